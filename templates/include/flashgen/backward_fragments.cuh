// What the backward adds to gemm_sync.cuh: operands that warps share through shared memory, and what lies between the
// products. s[m][n][4] is transposed here: fragment m of 16 keys, n of 8 queries.
#pragma once
#include "flashgen/gemm_sync.cuh"
#include "flashgen/ptx/atomic.cuh"
#include "flashgen/query_pairs.cuh"
#include "flashgen/query_range.cuh"

// The B operand of a product over a tile's rows, for warp `column_warp` of WARPS, a power of two, that share its columns.
// They get blocks of 16 like cards dealt, so that each steps along them by immediates, whatever the number of columns.
// A block past the tile's end is read as the first: what comes of it is dropped.
template <class Shape, int WARPS>
struct DealtColumns {
  static constexpr int BLOCKS = Shape::COLS / 16;
  typename Shape::LaneView view;
  int column_warp, first_round;

  FG_DEVICE DealtColumns(const unsigned char* tile, int column_warp, int lane, int first_round = 0)
      : view(tile, lane % 16, lane / 16 + 2 * column_warp), column_warp(column_warp), first_round(first_round) {}

  FG_DEVICE const unsigned char* at(int rows16, int n) const {
    const int round = first_round + n;
    const bool exists = (round + 1) * WARPS <= BLOCKS || round * WARPS + column_warp < BLOCKS;
    return view.at(rows16, exists ? round * WARPS : 0);
  }
};

// The A operand whose rows are the columns of a tile: fragment m is their block m * STRIDE + `first` of 16.
template <class Shape, int M, int STRIDE>
struct ColumnsOfShared {
  typename Shape::LaneView view;

  FG_DEVICE ColumnsOfShared(const unsigned char* tile, int first, int lane)
      : view(tile, lane % 8 + lane / 16 * 8, lane / 8 % 2 + 2 * first) {}

  FG_DEVICE void fragment(uint32_t (&a)[M][4], int k) const {
#pragma unroll
    for (int m = 0; m < M; ++m) ldmatrix_x4_trans(a[m], view.at(k, m * STRIDE));
  }
};

// acc += a b over K_STEPS steps of 16 rows of b, where `operand` gives the A fragments.
template <int K_STEPS, class Element, class Operand, class View, int M, int V>
FG_DEVICE void gemm_rows(float (&acc)[M][V][4], const Operand& operand, const View& rows) {
#pragma unroll
  for (int k = 0; k < K_STEPS; ++k) {
    uint32_t a[M][4];
    operand.fragment(a, k);
    add_values<Element>(acc, a, rows, k);
  }
}

template <int M, int N>
FG_DEVICE void copy(float (&to)[M][N][4], const float (&x)[M][N][4]) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) to[m][n][i] = x[m][n][i];
}

// What is 0 stays 0, as masked pairs have to, whatever it is multiplied by.
template <int M, int N>
FG_DEVICE void multiply(float (&x)[M][N][4], const float (&by)[M][N][4]) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) x[m][n][i] = x[m][n][i] == 0.0f ? 0.0f : x[m][n][i] * by[m][n][i];
}

// dS from dP, which it replaces, and from P in fp32, times the slope of scores where an expression changes them.
template <int M, int N>
FG_DEVICE void differentiate(float (&dp)[M][N][4], const float (&p)[M][N][4], const float* neg_delta) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const QueryPair here = query_pair(neg_delta, n);
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        dp[m][n][2 * h] = p[m][n][2 * h] * (dp[m][n][2 * h] + here.first);
        dp[m][n][2 * h + 1] = p[m][n][2 * h + 1] * (dp[m][n][2 * h + 1] + here.second);
      }
  }
}

// Sets to zero what belongs to a masked pair, whatever it was: an infinity or NaN there must not reach a sum. `kv_pos`
// and `q_pos` are those of this lane's element x[0][0][0]; `seen_by(kv_pos)` is the range of queries that see a key.
template <int M, int N, class SeenBy>
FG_DEVICE void zero_masked(float (&x)[M][N][4], int kv_pos, int q_pos, SeenBy seen_by) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const QueryRange queries = seen_by(kv_pos + 16 * m + 8 * h);
      const QueryRange here = {queries.begin - q_pos, queries.end - q_pos};  // so that columns are constants
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (!holds(here, 8 * n + i)) x[m][n][2 * h + i] = 0.0f;
    }
}

// Rounds fragments to elements of a tile, free of bank conflicts thanks to its swizzle. `row` is that of this lane's
// x[0][0][0]; fragment n goes to chunk `chunk` + n, where `chunk` is a multiple of N or of a panel.
template <class Shape, class Element, int M, int N>
FG_DEVICE void store_fragments(unsigned char* tile, const float (&x)[M][N][4], int row, int chunk) {
  const int lane_offset = Shape::offset(row, chunk) + threadIdx.x % 4 * 4;
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int n = 0; n < N; ++n) {
        unsigned char* const target = tile + Shape::step(16 * m + 8 * h, n);
        *reinterpret_cast<uint32_t*>(target + (lane_offset ^ (n % Shape::PANEL_CHUNKS * CHUNK_BYTES))) =
            pack2(Element{}, x[m][n][2 * h], x[m][n][2 * h + 1]);
      }
}

// The same for columns that were dealt to WARPS warps, times a factor.
template <class Shape, int WARPS, class Element, int M, int V>
FG_DEVICE void store_dealt(unsigned char* tile, const float (&x)[M][V][4], int row, int column_warp, float factor) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const int chunk = (v / 2 * WARPS + column_warp) * 2 + v % 2;
        if ((v / 2 + 1) * 2 * WARPS > Shape::CHUNKS && chunk >= Shape::CHUNKS) break;
        unsigned char* const target = tile + Shape::offset(row + 16 * m + 8 * h, chunk) + threadIdx.x % 4 * 4;
        *reinterpret_cast<uint32_t*>(target) =
            pack2(Element{}, x[m][v][2 * h] * factor, x[m][v][2 * h + 1] * factor);
      }
}

// Adds a warp's part of dQ to its sums in device memory, whose order lets the lanes of a warp add to 32 places in a row.
// Rows and columns were dealt, 16 at a time, to ROW_WARPS and COL_WARPS warps; COLS of the columns are kept. `sums`
// points at those of the query tile: [64 rows][8 columns][16 rows][4 parts of a fragment][32 lanes].
template <int COLS, int ROW_WARPS, int COL_WARPS, int M, int V>
FG_DEVICE void add_dq(float* sums, const float (&dq)[M][V][4], int row_warp, int col_warp, int first_round) {
  static_assert(4 % ROW_WARPS == 0, "a warp's fragments lie at the same place in each group of 64 rows");
  float* const own = sums + col_warp * (2 * 512) + row_warp * 128 + threadIdx.x % WARP_SIZE;
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int block = (first_round + v / 2) * COL_WARPS;
      if (block + COL_WARPS > COLS / 16 && block + col_warp >= COLS / 16) break;
      const int fragment = m * ROW_WARPS / 4 * (COLS / 8) + 2 * block + v % 2;
#pragma unroll
      for (int i = 0; i < 4; ++i) red_add_f32(own + fragment * 512 + m * ROW_WARPS % 4 * 128 + i * 32, dq[m][v][i]);
    }
}
