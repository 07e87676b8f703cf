// Accumulators that wait in device memory between visits of a query tile, in fp32 (FlashAttention-1). Each thread finds its
// own numbers again, so no other thread has to see them.
#pragma once
#include "flashgen/gemm_sync.cuh"
#include "flashgen/softmax.cuh"

// A tile of [64 rows][8 columns][16 rows][32 lanes] x 4 floats: the order `vector` of the slot dq_order. Rows and columns
// are dealt, 16 at a time, to ROW_WARPS and COL_WARPS warps; COLS of the columns are kept.
template <int COLS, int ROW_WARPS, int COL_WARPS>
struct StoredBy {
  static_assert(ROW_WARPS % 4 == 0 || 4 % ROW_WARPS == 0, "a step of m moves whole groups, or stays in one");
  static constexpr int COLUMN = 4 * WARP_SIZE, GROUP = COLS / 8 * COLUMN;

  // each(m, v, place) for the warp's fragments [m][v] from round `first_round` on.
  template <int M, int V, class Each>
  static FG_DEVICE void visit(float* tile, int row_warp, int col_warp, int first_round, Each each) {
    Floats4* const own = reinterpret_cast<Floats4*>(tile) + col_warp * (2 * COLUMN) + row_warp / 4 * GROUP +
                         row_warp % 4 * WARP_SIZE + threadIdx.x % WARP_SIZE;
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const int block = (first_round + v / 2) * COL_WARPS;
        if (block + COL_WARPS > COLS / 16 && block + col_warp >= COLS / 16) break;
        const int rows = m * ROW_WARPS;
        each(m, v, own + rows / 4 * GROUP + rows % 4 * WARP_SIZE + (2 * block + v % 2) * COLUMN);
      }
  }
};

// Fragments of columns that the tile does not have stay as they are.
template <class Stored, int M, int V>
FG_DEVICE void read_stored(float (&x)[M][V][4], float* tile, int row_warp, int col_warp = 0, int first_round = 0) {
  Stored::template visit<M, V>(tile, row_warp, col_warp, first_round, [&](int m, int v, const Floats4* place) {
    const Floats4 four = *place;
#pragma unroll
    for (int i = 0; i < 4; ++i) x[m][v][i] = four.values[i];
  });
}

template <class Stored, int M, int V>
FG_DEVICE void write_stored(float* tile, const float (&x)[M][V][4], int row_warp, int col_warp = 0, int first_round = 0) {
  Stored::template visit<M, V>(tile, row_warp, col_warp, first_round, [&](int m, int v, Floats4* place) {
    *place = Floats4{{x[m][v][0], x[m][v][1], x[m][v][2], x[m][v][3]}};
  });
}

// The maximum and the sum of this lane's rows `row` and `row` + 8. All lanes of the quad get the whole sum.
FG_DEVICE void read_row_state(RowState<1>& rows, const float* max, const float* sum, int row) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    rows.max[0][h] = max[row + 8 * h];
    rows.sum[0][h] = sum[row + 8 * h];
  }
}

FG_DEVICE void write_row_state(float* max, float* sum, const RowState<1>& rows, int row) {
  if (threadIdx.x % 4 != 0) return;  // one lane of the quad
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    max[row + 8 * h] = rows.max[0][h];
    sum[row + 8 * h] = rows.sum[0][h];
  }
}

// diag(l) O: the sums that O was divided by come back. Then one lane of the quad keeps a row's sum, as its share.
template <int V>
FG_DEVICE void undo_normalise(float (&o)[1][V][4], RowState<1>& rows) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      o[0][v][2 * h] *= rows.sum[0][h];
      o[0][v][2 * h + 1] *= rows.sum[0][h];
    }
    rows.sum[0][h] = threadIdx.x % 4 == 0 ? rows.sum[0][h] : 0.0f;
  }
}
