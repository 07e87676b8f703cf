// The output of a warp's 16 rows, from fragments to device memory. w[n][h] holds columns 8 * n + 2 * (lane % 4) and the
// next of row lane / 4 + 8 * h, rounded to elements.
#pragma once
#include "flashgen/ptx/bulk.cuh"
#include "flashgen/ptx/convert.cuh"
#include "flashgen/ptx/fence.cuh"
#include "flashgen/ptx/stmatrix.cuh"
#include "flashgen/ptx/tma.cuh"
#include "flashgen/ptx/warp.cuh"
#include "flashgen/tile.cuh"

template <class Element, int V>
FG_DEVICE void pack_output(uint32_t (&w)[V][2], const float (&o)[1][V][4]) {
#pragma unroll
  for (int n = 0; n < V; ++n)
#pragma unroll
    for (int h = 0; h < 2; ++h) w[n][h] = pack2(Element{}, o[0][n][2 * h], o[0][n][2 * h + 1]);
}

// By way of shared memory, panel by panel: the warp writes the image of a panel, store(panel, image) takes it from there,
// and the warp goes on. `image(panel)` is the place of a panel (a TileShape of 16 rows has its layout), of which STAGES
// differ; it must be free: of TMA, and of this warp's lanes.
template <class Rows16, int STAGES, int V, class Image, class Store>
FG_DEVICE void store_panels(const uint32_t (&w)[V][2], Image image, Store store) {
  const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
  for (int first = 0; first < V; first += Rows16::PANEL_CHUNKS) {
    const int panel = first / Rows16::PANEL_CHUNKS;
    unsigned char* const target = image(panel % STAGES);
    if (panel >= STAGES) {  // its last panel has to be read first
      if (lane == 0) bulk_wait_read<STAGES - 1>();
      sync_warp();
    }
#pragma unroll
    for (int n = first; n < first + Rows16::PANEL_CHUNKS && n < V; n += 2)
      stmatrix_x4(target + Rows16::offset(lane % 16, n - first + lane / 16), {w[n][0], w[n][1], w[n + 1][0], w[n + 1][1]});
    fence_proxy_async_shared();
    sync_warp();
    store(panel, target);
  }
}

// The same by TMA. Rows and columns past the tensor's end are left out.
template <class Rows16>
FG_DEVICE void store_box(const TensorMap* map, const unsigned char* image, int panel, int row, int head, int batch) {
  if (threadIdx.x % WARP_SIZE != 0) return;
  tma_store_4d(map, image, panel * Rows16::PANEL_CHUNKS * ELEMENTS_PER_CHUNK, row, head, batch);
  bulk_commit();
}

// ... by plain stores, for rows that end where another sequence begins, or are no box. (For all rows this would be slower
// than TMA: docs/fa3.md.) Of the first `valid_rows` rows, columns below HEAD_DIM; two lanes have a row each, which
// `row` points at.
FG_DEVICE int stored_row() { return threadIdx.x % WARP_SIZE / 2; }
template <class Rows16, int HEAD_DIM, class Element>
FG_DEVICE void store_image(Element* row, const unsigned char* image, int panel, int valid_rows) {
  if (stored_row() >= valid_rows) return;
#pragma unroll
  for (int i = 0; i < Rows16::PANEL_CHUNKS; i += 2) {
    const int chunk = i + threadIdx.x % 2, col = (panel * Rows16::PANEL_CHUNKS + chunk) * ELEMENTS_PER_CHUNK;
    if (col < HEAD_DIM)
      *reinterpret_cast<Chunk*>(row + col) = *reinterpret_cast<const Chunk*>(image + Rows16::offset(stored_row(), chunk));
  }
}

// Lanes whose `lane_bit` differs swap: what the lower one has in `high` for what the upper one has in `low`.
FG_DEVICE void trade(uint32_t& low, uint32_t& high, int lane_bit) {
  const bool upper = threadIdx.x & lane_bit;
  const uint32_t received = shfl_xor(upper ? low : high, lane_bit);
  (upper ? low : high) = received;
}

// Without shared memory, by plain stores: the lanes of a quad trade, four chunks at a time, until each has whole chunks.
// Writes columns 0 .. HEAD_DIM - 1 of the first `valid_rows` rows, of which row r is at `place(r)`.
template <int HEAD_DIM, class Place, int V>
FG_DEVICE void store_rows(Place place, const uint32_t (&w)[V][2], int valid_rows) {
  constexpr int CHUNKS = HEAD_DIM / ELEMENTS_PER_CHUNK;
  const int lane_row = threadIdx.x % WARP_SIZE / 4, quad_lane = threadIdx.x % 4;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    // As whole chunks from here on: added to an Element*, the compiler would not know that they are aligned.
    Chunk* const target = reinterpret_cast<Chunk*>(place(lane_row + 8 * h)) + quad_lane;
    const bool exists = lane_row + 8 * h < valid_rows;
#pragma unroll
    for (int first = 0; first < V; first += 4) {  // four chunks
      uint32_t x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = first + i < V ? w[(first + i) % V][h] : 0;
      trade(x[0], x[1], 1);
      trade(x[2], x[3], 1);
      trade(x[0], x[2], 2);
      trade(x[1], x[3], 2);
      if (exists && first + quad_lane < CHUNKS) target[first] = {x[0], x[1], x[2], x[3]};
    }
  }
}
