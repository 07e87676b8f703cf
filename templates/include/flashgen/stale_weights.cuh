// From scores that softmax_stale.cuh has made relative to their row's reference to weights, and their sums by row.
#pragma once
#include "flashgen/softmax_stale.cuh"

// The weights 2^s, packed as pack_weights would, and their sums by row.
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

// Makes the weights of a tile whose scores relate_exact has left: none is higher than 2^stale_log2.
// `make(sums)` does so and gives their sums, as pack_exponentials.
template <class Make>
FG_DEVICE void weigh_exact(StaleRows& rows, Make make) {
  float sums[2];
  make(sums);
#pragma unroll
  for (int h = 0; h < 2; ++h) rows.sum[0][h] += sums[h];
}

// ... and those of any other tile. A weight above 2^stale_log2 makes a sum of at least that. Then (and sometimes without
// need, which changes nothing) references are raised, and all weights made once more. (A NaN makes a sum NaN, and is let
// through.)
template <class Element, int N, class Make>
FG_DEVICE void weigh(float (&s)[1][N][4], StaleRows& rows, Rescale& rescale, Make make) {
  float sums[2];
  make(sums);
  if (any_in_warp(rows.far || fmaxf(sums[0], sums[1]) > stale_weight(Element{}))) {
    raise_references<Element>(s, rows, rescale);
    make(sums);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) rows.sum[0][h] += sums[h];
}

// s becomes 2^s and joins the sums.
template <int N>
FG_DEVICE void exponentiate(float (&s)[1][N][4], StaleRows& rows) {
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
