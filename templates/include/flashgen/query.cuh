// Where the A operand of the QK product comes from: read from shared memory at each k-step, or held in registers.
#pragma once
#include "flashgen/ptx/ldmatrix.cuh"
#include "flashgen/tile.cuh"

template <class Shape, int M>
struct QueryInShared {
  typename Shape::LaneView view;

  // `first_row` of this warp in the tile; A matrices are (rows 0-7, columns 0-7), (rows 8-15, columns 0-7), ...
  FG_DEVICE QueryInShared(const unsigned char* tile, int first_row, int lane)
      : view(tile + first_row * Shape::ROW_BYTES, lane % 16, lane / 16) {}

  FG_DEVICE void fragment(uint32_t (&a)[M][4], int k) const {
#pragma unroll
    for (int m = 0; m < M; ++m) ldmatrix_x4(a[m], view.at(m, k));
  }
};

template <class Shape, int M, int K_STEPS>
struct QueryInRegisters {
  uint32_t fragments[K_STEPS][M][4];

  FG_DEVICE QueryInRegisters(const unsigned char* tile, int first_row, int lane) {
    const QueryInShared<Shape, M> shared(tile, first_row, lane);
#pragma unroll
    for (int k = 0; k < K_STEPS; ++k) shared.fragment(fragments[k], k);
  }

  FG_DEVICE void fragment(uint32_t (&a)[M][4], int k) const {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) a[m][i] = fragments[k][m][i];
  }
};
