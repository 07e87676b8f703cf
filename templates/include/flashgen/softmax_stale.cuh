// Online softmax against a reference that is looked at rarely: the reference of a row is raised only when one of its
// scores passes it by more than stale_log2. That shows in the sums of the weights, which are made anyway: one vote for a
// tile, no maxima, no shuffles. The result is the same in exact arithmetic, since numerator and denominator share the
// reference. A tile takes two steps: its scores become relative to the reference (relate_...), then weights (weigh).
// Fragments as in gemm_async.cuh; units are powers of two.
#pragma once
#include "flashgen/ptx/convert.cuh"
#include "flashgen/stale_rows.cuh"

// How far, in powers of two, a weight may outgrow 1. Its precision does not depend on that, only its range does: fp16
// ends at 2^16; bf16 and the sums have the exponents of fp32, and 2^64 leaves room for 2^14 keys with values of 2^49.
FG_DEVICE constexpr float stale_log2(bf16) { return 64.0f; }
FG_DEVICE constexpr float stale_log2(fp16) { return 14.0f; }
FG_DEVICE constexpr float stale_weight(bf16) { return 0x1p64f; }
FG_DEVICE constexpr float stale_weight(fp16) { return 0x1p14f; }

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

// Products of rows with a far reference become relative to it, which relate_... left to this.
template <int N>
FG_DEVICE void subtract_far(float (&s)[1][N][4], const StaleRows& rows) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const bool far = is_far(rows.subtrahend[0][h]);
    const float reference = rows.reference(h);
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 2 * h; i < 2 * h + 2; ++i) s[0][n][i] = far ? above(s[0][n][i], reference) : s[0][n][i];
  }
}

// Raises references to true maxima. Far ones are left for subtract_far.
template <class Element, int N>
FG_DEVICE Rescale relate_to_maxima(float (&s)[1][N][4], StaleRows& rows, float scale_log2) {
  Rescale rescale;
  bool behind = false;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float highest = row_max(s, h) * scale_log2, reference = rows.reference(h);
    const bool raise = above(highest, reference) > stale_log2(Element{});  // row by row: bits never depend on neighbours
    if (raise) rows.set_reference(h, usable(highest));
    rescale.factor[h] = raise ? exp2_approx(reference - usable(highest)) : 1.0f;
    rows.sum[0][h] *= rescale.factor[h];
    behind |= raise;
    const float subtrahend = rows.subtrahend[0][h] == -INFINITY ? 0.0f : rows.subtrahend[0][h];  // no -inf - -inf
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 2 * h; i < 2 * h + 2; ++i) s[0][n][i] = fmaf(s[0][n][i], scale_log2, -subtrahend);
  }
  rows.see_far();
  rescale.any = any_in_warp(behind);
  return rescale;
}

// The first tile of a row block, and any tile in which a row may meet its first key.
template <class Element, int N>
FG_DEVICE Rescale relate_exact(float (&s)[1][N][4], StaleRows& rows, float scale_log2) {
  const Rescale rescale = relate_to_maxima<Element>(s, rows, scale_log2);
  if (any_in_warp(rows.far)) subtract_far(s, rows);
  return rescale;
}

// Any later tile: every row has its reference (StaleRows::settle).
template <class Element, int N>
FG_DEVICE Rescale relate_stale(float (&s)[1][N][4], const StaleRows& rows, float scale_log2) {
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) s[0][n][i] = fmaf(s[0][n][i], scale_log2, -rows.subtrahend[0][i / 2]);
  return {};
}

// Any tile, where rows meet their first key at any time: while a row of the warp has yet to, true maxima.
template <class Element, int N>
FG_DEVICE Rescale relate_any(float (&s)[1][N][4], StaleRows& rows, float scale_log2) {
  if (any_in_warp(rows.subtrahend[0][0] == -INFINITY || rows.subtrahend[0][1] == -INFINITY))
    return relate_to_maxima<Element>(s, rows, scale_log2);
  return relate_stale<Element>(s, rows, scale_log2);
}

// Raises the reference of rows that have passed it to their maximum, and has far ones subtracted. By whole warps, some row of
// which may need it; s as relate_stale left it.
template <class Element, int N>
FG_DEVICE void raise_references(float (&s)[1][N][4], StaleRows& rows, Rescale& rescale) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const bool was_far = is_far(rows.subtrahend[0][h]);
    const float old = rows.reference(h), highest = row_max(s, h);
    const bool raise = (was_far ? above(highest, old) : highest) > stale_log2(Element{});  // row by row, as above
    const float reference = raise ? usable(was_far ? highest : old + highest) : old;
    const float moved = raise ? reference - old : 0.0f;  // what rounding made of it
    const float factor = exp2_approx(-moved);
    rows.set_reference(h, reference);
    rescale.factor[h] *= factor;
    rows.sum[0][h] *= factor;
    const float rest = was_far ? reference : moved;
    const float same = is_far(rows.subtrahend[0][h]) ? fabsf(reference) * 0x1p-22f : 0.0f;  // as `above` has it
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 2 * h; i < 2 * h + 2; ++i) {
        const float difference = s[0][n][i] - rest;
        s[0][n][i] = fabsf(difference) < same ? 0.0f : difference;
      }
  }
  rows.see_far();
  rescale.any = true;
}

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

// ---- The same where registers do not hold scores and weights at once: weights take the place of the scores, so maxima
// are looked at first, half an instruction more per score and a vote before the first exponential.

template <class Element, int N>
FG_DEVICE Rescale relate_checked(float (&s)[1][N][4], StaleRows& rows, float scale_log2) {
  Rescale rescale = relate_stale<Element>(s, rows, scale_log2);
  // Of numbers above zero, those of higher value have the higher bits: only "any above stale_log2" is asked, so
  // signed integers will do, and of those the hardware compares three at once. (A NaN counts as high, or is ignored.)
  constexpr int LOWEST = -2147483647 - 1;
  int highest[4] = {LOWEST, LOWEST, LOWEST, LOWEST};
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int& high = highest[n % 2 * 2 + h];
      high = max_int(max_int(high, float_bits(s[0][n][2 * h])), float_bits(s[0][n][2 * h + 1]));
    }
  const int high = max_int(max_int(highest[0], highest[1]), max_int(highest[2], highest[3]));
  if (any_in_warp(rows.far || high > float_bits(stale_log2(Element{})))) raise_references<Element>(s, rows, rescale);
  return rescale;
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
