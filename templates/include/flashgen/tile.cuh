// A tile of rows in shared memory: columns in panels of 64 (or 32, where the head dim asks for it), each panel
// [rows][panel] with its 16-byte chunks swizzled,
//   chunk' = chunk ^ (row % 8)       in 128-byte panel rows
//   chunk' = chunk ^ (row / 2 % 4)   in  64-byte panel rows
// so that the eight rows an ldmatrix reads at one column lie in eight different bank groups, and the eight chunks that
// eight threads of a copy write fill one line of banks.
#pragma once
#include "flashgen/ptx/cp_async.cuh"

template <int ROWS_, int COLS_>
struct TileShape {
  static constexpr int ROWS = ROWS_;
  static constexpr int COLS = COLS_;  // head dim, padded to whole panels
  static constexpr int CHUNKS = COLS / ELEMENTS_PER_CHUNK;
  static constexpr int PANEL_CHUNKS = COLS % 64 == 0 ? 8 : 4;
  static constexpr int ROW_BYTES = PANEL_CHUNKS * CHUNK_BYTES;
  static constexpr int PANEL_BYTES = ROWS * ROW_BYTES;
  static constexpr int BYTES = CHUNKS / PANEL_CHUNKS * PANEL_BYTES;
  static_assert(COLS % 32 == 0, "whole panels");

  static constexpr int THREADS_PER_ROW = PANEL_CHUNKS;

  FG_DEVICE static int swizzle(int row) { return PANEL_CHUNKS == 8 ? row & 7 : (row >> 1) & 3; }
  // Byte offset of a chunk.
  FG_DEVICE static int offset(int row, int chunk) {
    return step(row, chunk) + ((chunk % PANEL_CHUNKS ^ swizzle(row)) * CHUNK_BYTES);
  }
  // How far whole groups of 8 rows and whole panels move an offset: they leave the swizzle as it is.
  FG_DEVICE static int step(int rows, int chunks) { return chunks / PANEL_CHUNKS * PANEL_BYTES + rows * ROW_BYTES; }

  // A lane's way through the tile for ldmatrix. `row` (below 16) and `chunk` (0 or 1) are its own in the first 16 x 16
  // block; a step along the columns is one XOR, a step along the rows an immediate.
  struct LaneView {
    const unsigned char* tile;
    int lane_offset;
    FG_DEVICE LaneView(const unsigned char* tile, int row, int chunk) : tile(tile), lane_offset(offset(row, chunk)) {}
    // Address in the block of 16 rows `rows16` and 16 columns `cols16`.
    FG_DEVICE const unsigned char* at(int rows16, int cols16) const {
      return tile + step(16 * rows16, 2 * cols16) + (lane_offset ^ (2 * cols16 % PANEL_CHUNKS * CHUNK_BYTES));
    }
  };
};

// One thread's part in copying a tile: its first row and chunk, in device memory and in shared memory.
template <class Shape>
struct ThreadCopy {
  static FG_DEVICE int row() { return threadIdx.x / Shape::THREADS_PER_ROW; }
  static FG_DEVICE int chunk() { return threadIdx.x % Shape::THREADS_PER_ROW; }
  static FG_DEVICE int smem_offset() { return Shape::offset(row(), chunk()); }
  template <class Element>
  static FG_DEVICE const Element* source(const Element* gmem, int64_t row_stride) {
    return gmem + row() * row_stride + chunk() * ELEMENTS_PER_CHUNK;
  }
};

// Starts the copy of one tile by all THREADS of the block: rows `0 .. ROWS - 1` from `gmem`, of which the first
// `valid_rows` exist (the others become zero), and the first HEAD_DIM of COLS columns (the others become zero).
template <class Shape, int HEAD_DIM, int THREADS, class Element>
FG_DEVICE void load_tile(unsigned char* smem, const Element* gmem, int64_t row_stride, int valid_rows) {
  constexpr int ROWS_PER_PASS = THREADS / Shape::THREADS_PER_ROW;
  unsigned char* const target = smem + ThreadCopy<Shape>::smem_offset();
  const Element* source = ThreadCopy<Shape>::source(gmem, row_stride);
#pragma unroll
  for (int first = 0; first < Shape::ROWS; first += ROWS_PER_PASS) {
    const int row = first + ThreadCopy<Shape>::row();
    if (first + ROWS_PER_PASS > Shape::ROWS && row >= Shape::ROWS) break;
#pragma unroll
    for (int i = 0; i < Shape::CHUNKS / Shape::THREADS_PER_ROW; ++i) {
      const int chunk = i * Shape::THREADS_PER_ROW;
      const bool exists = row < valid_rows && (chunk + ThreadCopy<Shape>::chunk()) * ELEMENTS_PER_CHUNK < HEAD_DIM;
      cp_async_16_zfill(target + Shape::step(first, chunk), exists ? source + chunk * ELEMENTS_PER_CHUNK : gmem,
                        exists ? CHUNK_BYTES : 0);
    }
    source += ROWS_PER_PASS * row_stride;
  }
}

// As load_tile for a tile whose rows all exist: no row tests in the main loop. `source` is ThreadCopy's.
template <class Shape, int HEAD_DIM, int THREADS, class Element>
FG_DEVICE void load_full_tile(unsigned char* smem, const Element* source, int64_t row_stride) {
  constexpr int ROWS_PER_PASS = THREADS / Shape::THREADS_PER_ROW;
  unsigned char* const target = smem + ThreadCopy<Shape>::smem_offset();
#pragma unroll
  for (int first = 0; first < Shape::ROWS; first += ROWS_PER_PASS) {
    if (first + ROWS_PER_PASS > Shape::ROWS && first + ThreadCopy<Shape>::row() >= Shape::ROWS) break;
#pragma unroll
    for (int i = 0; i < Shape::CHUNKS / Shape::THREADS_PER_ROW; ++i) {
      const int chunk = i * Shape::THREADS_PER_ROW;
      if ((chunk + Shape::THREADS_PER_ROW) * ELEMENTS_PER_CHUNK <= HEAD_DIM) {
        cp_async_16(target + Shape::step(first, chunk), source + chunk * ELEMENTS_PER_CHUNK);
      } else {  // the chunks that pad the head dim are zero
        const bool exists = (chunk + ThreadCopy<Shape>::chunk()) * ELEMENTS_PER_CHUNK < HEAD_DIM;
        cp_async_16_zfill(target + Shape::step(first, chunk),
                          exists ? source + chunk * ELEMENTS_PER_CHUNK : source, exists ? CHUNK_BYTES : 0);
      }
    }
    source += ROWS_PER_PASS * row_stride;
  }
}
