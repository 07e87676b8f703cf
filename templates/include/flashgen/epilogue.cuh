// Normalises the accumulator and writes out and lse.
#pragma once
#include "flashgen/ptx/convert.cuh"
#include "flashgen/ptx/math.cuh"
#include "flashgen/softmax.cuh"
#include "flashgen/tile.cuh"

// The sum of each row, where each lane of the quad had its share.
template <class Rows>
FG_DEVICE void add_up(Rows& rows) {
  constexpr int M = sizeof(rows.sum) / sizeof(rows.sum[0]);
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) rows.sum[m][h] = quad_sum(rows.sum[m][h]);
}

// Divides o by the sums of the rows. A row that saw no key has sum 0 and o 0: it stays exactly 0.
template <class Rows, int M, int V>
FG_DEVICE void normalise(float (&o)[M][V][4], const Rows& rows) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float inverse = rows.sum[m][h] == 0.0f ? 0.0f : rcp_approx(rows.sum[m][h]);
#pragma unroll
      for (int v = 0; v < V; ++v) {
        o[m][v][2 * h] *= inverse;
        o[m][v][2 * h + 1] *= inverse;
      }
    }
}

// Natural log of the sum of exp(scores); -inf where the row saw no key. `row` is that of s[0][0][0] in the tile, and
// `place(row)` where its lse goes.
template <class Place, class Rows>
FG_DEVICE void write_lse(Place place, int row, int valid_rows, const Rows& rows, float scale_log2) {
  constexpr int M = sizeof(rows.sum) / sizeof(rows.sum[0]);
  constexpr float LN_2 = 0.69314718055994531f;
  if (threadIdx.x % 4 != 0) return;  // one lane of the quad
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = row + 16 * m + 8 * h;
      const float sum = rows.sum[m][h];
      const float value = sum == 0.0f ? -INFINITY : (rows.reference_log2(m, h, scale_log2) + log2_approx(sum)) * LN_2;
      if (r < valid_rows) *place(r) = value;
    }
}
template <class Rows>
FG_DEVICE void write_lse(float* lse, int row, int valid_rows, const Rows& rows, float scale_log2) {
  write_lse([=](int r) { return lse + r; }, row, valid_rows, rows, scale_log2);
}

// Packs o into the warp's rows of a shared-memory tile, free of bank conflicts thanks to its swizzle.
template <class Shape, class Element, int M, int V>
FG_DEVICE void stage_output(unsigned char* tile, const float (&o)[M][V][4], int row) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int v = 0; v < V; ++v) {
        unsigned char* target = tile + Shape::offset(row + 16 * m + 8 * h, v) + threadIdx.x % 4 * 4;
        *reinterpret_cast<uint32_t*>(target) = pack2(Element{}, o[m][v][2 * h], o[m][v][2 * h + 1]);
      }
}

// Copies the tile to device memory in 16-byte pieces; rows past `valid_rows` and padding columns stay unwritten.
template <class Shape, int HEAD_DIM, int THREADS, class Element>
FG_DEVICE void store_tile(Element* out, int64_t row_stride, const unsigned char* tile, int valid_rows) {
  constexpr int CHUNKS_PER_ROW = HEAD_DIM / ELEMENTS_PER_CHUNK;
  for (int i = threadIdx.x; i < Shape::ROWS * CHUNKS_PER_ROW; i += THREADS) {
    const int row = i / CHUNKS_PER_ROW;
    const int chunk = i % CHUNKS_PER_ROW;
    if (row < valid_rows) {
      *reinterpret_cast<Chunk*>(out + row * row_stride + chunk * ELEMENTS_PER_CHUNK) =
          *reinterpret_cast<const Chunk*>(tile + Shape::offset(row, chunk));
    }
  }
}
