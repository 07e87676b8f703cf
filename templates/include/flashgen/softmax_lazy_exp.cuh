// From scores that softmax_lazy.cuh has made relative to their row references to P, and its row sums.
#pragma once
#include "flashgen/softmax_lazy.cuh"

// P = 2^s, packed as by pack_p, and its row sums.
template <class Element, int N>
FG_DEVICE void pack_exponentials(uint32_t (&p)[N / 2][4], float (&sums)[2], const float (&s)[1][N][4]) {
  float sum[4];  // four chains, for the latency of an addition
#pragma unroll
  for (int k = 0; k < N / 2; ++k)
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int n = 2 * k + r / 2, h = r % 2;
      const float even = exp2_approx(s[0][n][2 * h]), odd = exp2_approx(s[0][n][2 * h + 1]);
      sum[2 * h] = n == 0 ? even : sum[2 * h] + even;
      sum[2 * h + 1] = n == 0 ? odd : sum[2 * h + 1] + odd;
      p[k][r] = pack2(Element{}, even, odd);
    }
#pragma unroll
  for (int h = 0; h < 2; ++h) sums[h] = sum[2 * h] + sum[2 * h + 1];
}

// Makes P of a tile whose scores come from subtract_new_max: no element exceeds 2^rescale_threshold_log2. `make(sums)`
// makes P and gives its row sums, as pack_exponentials does.
template <class Make>
FG_DEVICE void exp_only(LazyRowState& rows, Make make) {
  float sums[2];
  make(sums);
#pragma unroll
  for (int h = 0; h < 2; ++h) rows.sum[0][h] += sums[h];
}

// Makes P of any other tile. An element above 2^rescale_threshold_log2 makes a row sum of at least that. Then (and
// sometimes without need, which changes nothing) row references are raised, and P is made once more. (A NaN makes a sum
// NaN, and is let through.)
template <class Element, int N, class Make>
FG_DEVICE void exp_and_check(float (&s)[1][N][4], LazyRowState& rows, Rescale& rescale, Make make) {
  float sums[2];
  make(sums);
  if (any_in_warp(rows.far || fmaxf(sums[0], sums[1]) > rescale_threshold(Element{}))) {
    raise_references<Element>(s, rows, rescale);
    make(sums);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) rows.sum[0][h] += sums[h];
}

// s becomes 2^s and joins the sums.
template <int N>
FG_DEVICE void exponentiate(float (&s)[1][N][4], LazyRowState& rows) {
  float sum[4];  // four chains, for the latency of an addition
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      s[0][n][i] = exp2_approx(s[0][n][i]);
      sum[i] = n == 0 ? s[0][n][i] : sum[i] + s[0][n][i];
    }
#pragma unroll
  for (int h = 0; h < 2; ++h) rows.sum[0][h] += sum[2 * h] + sum[2 * h + 1];
}
