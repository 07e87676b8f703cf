// Dropout in the backward, where scores are transposed: fragment m of 16 keys, n of 8 queries.
#pragma once
#include "flashgen/backward_fragments.cuh"
#include "flashgen/dropout.cuh"
#include "flashgen/ptx/convert.cuh"

// Gives dropped weights a minus sign: keys are rows. Of the queries 2c and 2c + 1 that a lane has, and those 8 behind
// them, each of the lanes of the keys 2r and 2r + 1 makes the bits of one, for both keys. Then they exchange halves.
template <int M, int N>
FG_DEVICE void mark_dropped(float (&p)[M][N][4], const Dropout& dropout, int head, uint32_t row, int kv_pos) {
  static_assert(N % 2 == 0, "fragments of 16 queries");
  constexpr int LANES_PER_KEY = 4;
  const bool odd = threadIdx.x / LANES_PER_KEY % 2;
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < N; ++n) {
      if (n % 2) continue;
      const Philox4 made = dropout.bits(head, row + odd + 8 * n, kv_pos + 16 * m);
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        const uint32_t own = odd ? made.words[2 + q] : made.words[q];
        const uint32_t theirs = shfl_xor(odd ? made.words[q] : made.words[2 + q], LANES_PER_KEY);
        const uint32_t words[2] = {odd ? theirs : own, odd ? own : theirs};  // of queries 2c and 2c + 1
#pragma unroll
        for (int k = 0; k < 2; ++k)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& weight = p[m][n + q][2 * k + i];
            weight = dropout.keeps(words[i], k) ? weight : -weight;
          }
      }
    }
}

FG_DEVICE bool is_dropped(float marked) { return float_bits(marked) < 0; }

// What is left of marked weights.
template <int M, int N>
FG_DEVICE void copy_kept(float (&kept)[M][N][4], const float (&marked)[M][N][4]) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) kept[m][n][i] = is_dropped(marked[m][n][i]) ? 0.0f : marked[m][n][i];
}

// dS from the gradients of weights behind dropout, which it replaces, and from marked weights: dropout lets a gradient
// through where it kept the weight, times `scale`. The derivative of a score would be one more factor here.
template <int M, int N>
FG_DEVICE void differentiate_dropped(float (&dp)[M][N][4], const float (&marked)[M][N][4], const float* neg_delta,
                                     float scale) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const QueryPair two = query_pair(neg_delta, n);
    const float here[2] = {two.first, two.second};
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float weight = marked[m][n][i];
        const float sum = is_dropped(weight) ? here[i % 2] : fmaf(dp[m][n][i], scale, here[i % 2]);
        dp[m][n][i] = fabsf(weight) * sum;
      }
  }
}
