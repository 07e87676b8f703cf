// A bit for each pair of a fragment that a mask lets through, where masks take long to ask: found once for P and dS.
// x[m][n][4] is fragment m of 16 keys, n of 8 queries.
#pragma once
#include "flashgen/prelude.cuh"

template <int M, int N>
struct SeenPairs {
  uint32_t words[(4 * M * N + 31) / 32] = {};

  // `sees(kv_pos, query)`, where the first key and query are those of this lane's element [0][0][0].
  template <class Sees>
  FG_DEVICE void find(int first_kv_pos, int first_query, Sees sees) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int bit = (m * N + n) * 4 + 2 * h + i;
            if (sees(first_kv_pos + 16 * m + 8 * h, first_query + 8 * n + i)) words[bit / 32] |= 1u << bit % 32;
          }
  }

  FG_DEVICE void zero_others(float (&x)[M][N][4]) const {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int bit = (m * N + n) * 4 + i;
          if ((words[bit / 32] >> bit % 32 & 1) == 0) x[m][n][i] = 0.0f;
        }
  }
};
