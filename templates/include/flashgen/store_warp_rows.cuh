// A warp's 16 rows of a tile of 64, from fragments to device memory by way of shared memory.
#pragma once
#include "flashgen/epilogue.cuh"
#include "flashgen/ptx/warp.cuh"
#include "flashgen/tile.cuh"

// `image` has room for the tile, and each of four warps for its own rows of it. `rows` are those of the whole tile.
template <class Shape, int HEAD_DIM, class Element, int N>
FG_DEVICE void store_warp_rows(unsigned char* image, const float (&x)[1][N][4], Element* rows, int64_t row_stride,
                               int valid_rows) {
  constexpr int CHUNKS = HEAD_DIM / ELEMENTS_PER_CHUNK;
  const int first_row = threadIdx.x % 128 / WARP_SIZE * 16, lane = threadIdx.x % WARP_SIZE;
  stage_output<Shape, Element>(image, x, first_row + lane / 4);
  sync_warp();
  for (int i = lane; i < 16 * CHUNKS; i += WARP_SIZE) {
    const int row = first_row + i / CHUNKS, chunk = i % CHUNKS;
    if (row < valid_rows)
      *reinterpret_cast<Chunk*>(rows + row * row_stride + chunk * ELEMENTS_PER_CHUNK) =
          *reinterpret_cast<const Chunk*>(image + Shape::offset(row, chunk));
  }
  sync_warp();  // before the image is written again
}
