// Infinities and NaNs in V. P of a masked key is 0, and 0 * NaN would still reach every row of its tile; the
// promise is that a non-finite value reaches exactly the rows that see it. So tiles under a mask are searched, and in
// the rare tile that holds such values they are added by hand to the rows that see them and replaced by zero. What
// `visible(q_pos)` gives of a row says by `holds(it, kv_pos)` whether the row sees a key.
#pragma once
#include "flashgen/mask.cuh"
#include "flashgen/ptx/convert.cuh"
#include "flashgen/ptx/fence.cuh"
#include "flashgen/tile.cuh"

// High bit of each half set where the 16-bit element is infinite or NaN: adding one in the last place of the exponent
// carries into the sign bit exactly when all exponent bits are set.
template <class Element>
FG_DEVICE uint32_t nonfinite_bits(uint32_t pair) {
  constexpr uint32_t LAST_PLACE = 0x8000u - Element::EXPONENT;
  return ((pair & 0x7fff7fffu) + (LAST_PLACE << 16 | LAST_PLACE)) & 0x80008000u;
}

// The same as a mask over those halves.
template <class Element>
FG_DEVICE uint32_t nonfinite_halves(uint32_t pair) {
  return (nonfinite_bits<Element>(pair) >> 15) * 0xffffu;
}

// Whether the block's tile holds any; every thread of the block calls it and gets the same answer.
template <class Shape, int THREADS, class Element>
FG_DEVICE bool tile_has_nonfinite(const unsigned char* tile) {
  constexpr int ROWS_PER_PASS = THREADS / Shape::THREADS_PER_ROW;
  uint32_t found = 0;
#pragma unroll
  for (int first = 0; first < Shape::ROWS; first += ROWS_PER_PASS) {
    if (first + ROWS_PER_PASS > Shape::ROWS && first + ThreadCopy<Shape>::row() >= Shape::ROWS) break;
#pragma unroll
    for (int i = 0; i < Shape::CHUNKS / Shape::THREADS_PER_ROW; ++i) {
      const Chunk chunk = *reinterpret_cast<const Chunk*>(tile + ThreadCopy<Shape>::smem_offset() +
                                                          Shape::step(first, i * Shape::THREADS_PER_ROW));
#pragma unroll
      for (int w = 0; w < 4; ++w) found |= nonfinite_bits<Element>(chunk.words[w]);
    }
  }
  return any_in_block(found != 0);
}

// Adds the tile's non-finite values to the rows of `o` that see their key, then zeroes them in the tile.
template <class Shape, int THREADS, class Element, int M, int V, class Visible>
FG_DEVICE void extract_nonfinite(float (&o)[M][V][4], unsigned char* tile, int q_pos, int kv_tile_start,
                                 Visible visible) {
#pragma unroll 1
  for (int i = 0; i < Shape::ROWS * V; ++i) {
    const int key = i / V, chunk = i % V;
    const uint32_t pair = *reinterpret_cast<const uint32_t*>(tile + Shape::offset(key, chunk) + threadIdx.x % 4 * 4);
    const uint32_t bits = nonfinite_bits<Element>(pair);
    if (bits == 0) continue;
    const float even = bits & 0x8000u ? to_float(Element{(uint16_t)pair}) : 0.0f;
    const float odd = bits >> 16 ? to_float(Element{(uint16_t)(pair >> 16)}) : 0.0f;
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (holds(visible(q_pos + 16 * m + 8 * h), kv_tile_start + key)) {
#pragma unroll
          for (int v = 0; v < V; ++v)  // registers have no run-time index
            if (v == chunk) {
              o[m][v][2 * h] += even;
              o[m][v][2 * h + 1] += odd;
            }
        }
      }
  }
  sync_block();  // every warp has read the tile before it changes
  for (int i = threadIdx.x; i < Shape::ROWS * Shape::CHUNKS * 4; i += THREADS) {
    unsigned char* const chunk = tile + Shape::offset(i / 4 / Shape::CHUNKS, i / 4 % Shape::CHUNKS);
    uint32_t& pair = reinterpret_cast<uint32_t*>(chunk)[i % 4];
    pair &= ~nonfinite_halves<Element>(pair);
  }
  sync_block();
}

// For kernels whose tiles pass through warps of their own on the way to the products: searches a tile that has landed
// and puts zeros where it finds any. By WARPS warps, of which this is number `warp`; each reports its own finds.
template <class Shape, int WARPS, class Element>
FG_DEVICE bool filter_tile(unsigned char* tile, int warp) {
  constexpr int CHUNKS = Shape::BYTES / CHUNK_BYTES, STEP = WARPS * WARP_SIZE;
  Chunk* const chunks = reinterpret_cast<Chunk*>(tile);  // in any order: what a chunk holds does not matter
  const int first = warp * WARP_SIZE + threadIdx.x % WARP_SIZE;
  uint32_t zeros[2] = {};  // pairs that stay 0 but for those: 0 * infinity is NaN
#pragma unroll 4
  for (int i = first; i < CHUNKS; i += STEP) {
    const Chunk chunk = chunks[i];
#pragma unroll
    for (int w = 0; w < 4; ++w) zeros[w % 2] = fma2(Element{}, chunk.words[w], 0, zeros[w % 2]);
  }
  if (!any_in_warp(((zeros[0] | zeros[1]) & 0x7fff7fff) != 0)) return false;
#pragma unroll 1
  for (int i = 4 * first; i < 4 * CHUNKS; i += i % 4 == 3 ? 4 * STEP - 3 : 1) {
    uint32_t& pair = reinterpret_cast<uint32_t*>(tile)[i];
    pair &= ~nonfinite_halves<Element>(pair);
  }
  fence_proxy_async_shared();  // the products read through the async proxy
  return true;
}

// For the non-finite values of keys [key, end) in device memory: add(h, col, pair) for each pair of columns that holds one
// and each row q_pos + 8 * h that sees its key, with 0 for a value that is finite. A lane has the columns that it has in
// fragments. `v` points at row 0 of the sequence. Not unrolled, and so not on fragments in registers: it is rare, and a
// tenth of a kernel that way.
template <int HEAD_DIM, class Element, class Visible, class Add>
FG_DEVICE void each_nonfinite(const Element* v, int64_t row_stride, int key, int end, int q_pos, Visible visible, Add add) {
#pragma unroll 1
  for (; key < end; ++key) {
    bool sees_key[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) sees_key[h] = holds(visible(q_pos + 8 * h), key);
#pragma unroll 1
    for (int col = threadIdx.x % 4 * 2; col < HEAD_DIM; col += 8) {
      const uint32_t pair = *reinterpret_cast<const uint32_t*>(v + key * row_stride + col);
      const uint32_t found = pair & nonfinite_halves<Element>(pair);
      if (found == 0) continue;
#pragma unroll
      for (int h = 0; h < 2; ++h)
        if (sees_key[h]) add(h, col, found);
    }
  }
}
