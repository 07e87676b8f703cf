// The two products of attention on mma.sync fragments, one warp at a time.
// s[m][n][4]: fragment m of 16 query rows, n of 8 keys. o[m][n][4]: the same with 8 columns of the head.
#pragma once
#include "flashgen/ptx/convert.cuh"
#include "flashgen/ptx/ldmatrix.cuh"
#include "flashgen/ptx/mma_sync.cuh"
#include "flashgen/tile.cuh"

template <int M, int N>
FG_DEVICE void clear(float (&acc)[M][N][4]) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[m][n][i] = 0.0f;
}

// s = q k^T. `query.fragment(a, k)` gives the A fragments of k-step k (16 columns of the head).
// A K row is a column of the B operand, so ldmatrix reads it as it lies: matrices (keys 0-7, columns 0-7),
// (keys 0-7, columns 8-15), (keys 8-15, ...), one ldmatrix for two mma columns.
template <int K_STEPS, class Element, class Query, class View, int M, int N>
FG_DEVICE void gemm_scores(float (&s)[M][N][4], const Query& query, const View& keys) {
  clear(s);
#pragma unroll
  for (int k = 0; k < K_STEPS; ++k) {
    uint32_t a[M][4];
    query.fragment(a, k);
#pragma unroll
    for (int n = 0; n < N / 2; ++n) {
      uint32_t b[4];
      ldmatrix_x4(b, keys.at(n, k));
#pragma unroll
      for (int m = 0; m < M; ++m) {
        mma_m16n8k16(Element{}, s[m][2 * n], a[m], b[0], b[1]);
        mma_m16n8k16(Element{}, s[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// o += a v for k-step k (16 keys), where `a` is the A fragment of P. V rows are keys, so ldmatrix transposes.
template <class Element, class View, int M, int V>
FG_DEVICE void add_values(float (&o)[M][V][4], const uint32_t (&a)[M][4], const View& values, int k) {
#pragma unroll
  for (int n = 0; n < V / 2; ++n) {
    uint32_t b[4];
    ldmatrix_x4_trans(b, values.at(k, n));
#pragma unroll
    for (int m = 0; m < M; ++m) {
      mma_m16n8k16(Element{}, o[m][2 * n], a[m], b[0], b[1]);
      mma_m16n8k16(Element{}, o[m][2 * n + 1], a[m], b[2], b[3]);
    }
  }
}

// o += p v. The score fragment of 16 keys is, packed, the A fragment of that k-step: P never leaves registers.
template <class Element, class View, int M, int N, int V>
FG_DEVICE void gemm_values(float (&o)[M][V][4], const float (&p)[M][N][4], const View& values) {
#pragma unroll
  for (int k = 0; k < N / 2; ++k) {
    uint32_t a[M][4];
#pragma unroll
    for (int m = 0; m < M; ++m) {
      a[m][0] = pack2(Element{}, p[m][2 * k][0], p[m][2 * k][1]);
      a[m][1] = pack2(Element{}, p[m][2 * k][2], p[m][2 * k][3]);
      a[m][2] = pack2(Element{}, p[m][2 * k + 1][0], p[m][2 * k + 1][1]);
      a[m][3] = pack2(Element{}, p[m][2 * k + 1][2], p[m][2 * k + 1][3]);
    }
    add_values<Element>(o, a, values, k);
  }
}
