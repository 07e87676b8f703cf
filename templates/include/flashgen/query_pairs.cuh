// What the backward reads for the columns of transposed scores, which are queries: a lane has two neighbours of each 8.
#pragma once
#include "flashgen/prelude.cuh"
#include "flashgen/ptx/math.cuh"

// -lse or -delta of the queries of a lane's columns 8 * n and 8 * n + 1, in a row that begins with its first.
struct alignas(8) QueryPair { float first, second; };
FG_DEVICE QueryPair query_pair(const void* lane_row, int n) {
  return *reinterpret_cast<const QueryPair*>(static_cast<const unsigned char*>(lane_row) + 32 * n);
}

// P from scores: 2 to the power of their multiple less the row's lse. `neg_lse` is that of this lane's s[0][0][0].
template <int M, int N>
FG_DEVICE void exponentiate_transposed(float (&s)[M][N][4], const void* neg_lse, float scale_log2) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const QueryPair l = query_pair(neg_lse, n);
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        s[m][n][2 * h] = exp2_approx(fmaf(s[m][n][2 * h], scale_log2, l.first));
        s[m][n][2 * h + 1] = exp2_approx(fmaf(s[m][n][2 * h + 1], scale_log2, l.second));
      }
  }
}
