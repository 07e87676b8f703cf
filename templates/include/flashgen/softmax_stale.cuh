// Online softmax against a reference that is looked at rarely: the reference of a row is raised only when one of its
// scores passes it by more than stale_log2. Finding that out costs half an instruction per score and one vote, no
// shuffles; the result is the same in exact arithmetic, since numerator and denominator share the reference.
// Fragments as in gemm_async.cuh; units are powers of two.
#pragma once
#include "flashgen/ptx/convert.cuh"
#include "flashgen/softmax.cuh"

// How far, in powers of two, a weight may outgrow 1. Its precision does not depend on that, only its range does: fp16
// ends at 2^16; bf16 and the sums have the exponents of fp32, and 2^32 leaves room for 2^14 keys with values of 2^81.
FG_DEVICE constexpr float stale_log2(bf16) { return 32.0f; }
FG_DEVICE constexpr float stale_log2(fp16) { return 14.0f; }

constexpr int LOWEST_INT = -2147483647 - 1;

struct StaleRows {
  float reference[1][2];  // of rows lane / 4 and lane / 4 + 8; -inf: no key seen yet
  float sum[1][2];        // this lane's share of the denominator

  FG_DEVICE StaleRows() : reference{{-INFINITY, -INFINITY}}, sum{{0.0f, 0.0f}} {}
  FG_DEVICE float reference_log2(int m, int h, float) const { return reference[m][h]; }
  // A row that has seen no key by now never will: any finite reference serves.
  FG_DEVICE void settle() {
#pragma unroll
    for (int h = 0; h < 2; ++h) reference[0][h] = reference[0][h] == -INFINITY ? 0.0f : reference[0][h];
  }
};

// What the output so far has to be multiplied with, by row; `any` is the same in all lanes of the warp.
struct Rescale {
  float factor[2];
  bool any;

  template <int V>
  FG_DEVICE void apply(float (&o)[1][V][4]) const {
    if (any) {
#pragma unroll
      for (int v = 0; v < V; ++v)
#pragma unroll
        for (int i = 0; i < 4; ++i) o[0][v][i] *= factor[i / 2];
    }
  }
};

template <int N>
FG_DEVICE float row_max(const float (&s)[1][N][4], int h) {
  float even = s[0][0][2 * h], odd = s[0][0][2 * h + 1];
#pragma unroll
  for (int n = 1; n < N; ++n) {
    even = fmaxf(even, s[0][n][2 * h]);
    odd = fmaxf(odd, s[0][n][2 * h + 1]);
  }
  return quad_max(fmaxf(even, odd));
}

// s becomes 2^s and joins the sums.
template <int N>
FG_DEVICE void exponentiate_and_sum(float (&s)[1][N][4], StaleRows& rows) {
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

// The first tile of a row block, and any tile in which a row may meet its first key: compares true maxima.
template <class Element, int N>
FG_DEVICE Rescale exponentiate_exact(float (&s)[1][N][4], StaleRows& rows, float scale_log2) {
  Rescale rescale;
  bool behind = false;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float highest = row_max(s, h) * scale_log2;
    const bool raise = highest - stale_log2(Element{}) > rows.reference[0][h];  // row by row: bits never depend on neighbours
    rescale.factor[h] = raise ? exp2_approx(rows.reference[0][h] - highest) : 1.0f;
    if (raise) rows.reference[0][h] = highest;
    rows.sum[0][h] *= rescale.factor[h];
    behind |= raise;
    const float reference = rows.reference[0][h] == -INFINITY ? 0.0f : rows.reference[0][h];  // no -inf - -inf
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 2 * h; i < 2 * h + 2; ++i) s[0][n][i] = fmaf(s[0][n][i], scale_log2, -reference);
  }
  rescale.any = any_in_warp(behind);
  exponentiate_and_sum(s, rows);
  return rescale;
}

// Any later tile: every row has its reference (StaleRows::settle).
template <class Element, int N>
FG_DEVICE Rescale exponentiate_stale(float (&s)[1][N][4], StaleRows& rows, float scale_log2) {
  Rescale rescale;  // its factors count only where `any`
  // Of numbers above zero, those of higher value have the higher bits: only "any above stale_log2" is asked, so
  // signed integers will do, and of those the hardware compares three at once. (A NaN counts as high, or is ignored.)
  int highest[4] = {LOWEST_INT, LOWEST_INT, LOWEST_INT, LOWEST_INT};
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float(&x)[4] = s[0][n];
      int& high = highest[n % 2 * 2 + h];
      x[2 * h] = fmaf(x[2 * h], scale_log2, -rows.reference[0][h]);
      x[2 * h + 1] = fmaf(x[2 * h + 1], scale_log2, -rows.reference[0][h]);
      high = max_int(max_int(high, float_bits(x[2 * h])), float_bits(x[2 * h + 1]));
    }
  const int high = max_int(max_int(highest[0], highest[1]), max_int(highest[2], highest[3]));
  rescale.any = any_in_warp(high > float_bits(stale_log2(Element{})));
  if (rescale.any) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float passed = row_max(s, h);
      const float raise = passed > stale_log2(Element{}) ? passed : 0.0f;
      rows.reference[0][h] += raise;
      rescale.factor[h] = exp2_approx(-raise);
      rows.sum[0][h] *= rescale.factor[h];
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 2 * h; i < 2 * h + 2; ++i) s[0][n][i] -= raise;
    }
  }
  exponentiate_and_sum(s, rows);
  return rescale;
}

// Any tile, where rows meet their first key at any time: while a row of the warp has yet to, true maxima.
template <class Element, int N>
FG_DEVICE Rescale exponentiate_any(float (&s)[1][N][4], StaleRows& rows, float scale_log2) {
  if (any_in_warp(rows.reference[0][0] == -INFINITY || rows.reference[0][1] == -INFINITY))
    return exponentiate_exact<Element>(s, rows, scale_log2);
  return exponentiate_stale<Element>(s, rows, scale_log2);
}
