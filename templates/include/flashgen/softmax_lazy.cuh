// Online softmax with lazy rescaling. A row's reference is raised only if a score exceeds it by rescale_threshold_log2.
// The row sums of P reveal that, so a tile needs one vote, no maxima and no shuffles. The result is the same in exact
// arithmetic, since numerator and denominator share the reference. A tile takes two steps: scores become relative to
// their row references (subtract_...), then P (exp_and_check).
// Fragments as in gemm_async.cuh; units are powers of two.
#pragma once
#include "flashgen/lazy_rows.cuh"
#include "flashgen/ptx/convert.cuh"

// The rescale threshold: how far, in powers of two, an element of P may outgrow 1. Its range depends on that, and its
// precision does not: fp16 ends at 2^16; bf16 and the sums have the exponents of fp32, and 2^64 leaves room for 2^14 keys
// with values of 2^49.
FG_DEVICE constexpr float rescale_threshold_log2(bf16) { return 64.0f; }
FG_DEVICE constexpr float rescale_threshold_log2(fp16) { return 14.0f; }
FG_DEVICE constexpr float rescale_threshold(bf16) { return 0x1p64f; }
FG_DEVICE constexpr float rescale_threshold(fp16) { return 0x1p14f; }

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

// Subtracts from the scores of each row what `rest` says.
template <int N>
FG_DEVICE void subtract_rest(float (&s)[1][N][4], const float (&rest)[2]) {
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) s[0][n][i] -= rest[i / 2];
}

// Makes 0 what is so near a far reference that nothing tells them apart (`above`).
template <int N>
FG_DEVICE void merge_near(float (&s)[1][N][4], const LazyRowState& rows) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float near = rows.is_far(h) ? fabsf(rows.reference(h)) * NEAR : 0.0f;
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 2 * h; i < 2 * h + 2; ++i) s[0][n][i] = fabsf(s[0][n][i]) < near ? 0.0f : s[0][n][i];
  }
}

// Raises references to true maxima; says whether some are far, which are then left for the caller to subtract.
template <class Element, int N>
FG_DEVICE bool subtract_maxima(float (&s)[1][N][4], LazyRowState& rows, Rescale& rescale, float scale_log2) {
  float highest[2], old[2];
  bool odd = rows.far, behind = false;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    highest[h] = row_max(s, h) * scale_log2;
    old[h] = rows.subtrahend[0][h];
    odd = odd || !is_plain(highest[h]);
  }
  const bool careful = any_in_warp(odd);
  if (careful) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      old[h] = rows.reference(h);
      highest[h] = above(highest[h], old[h]) == 0.0f ? old[h] : usable(highest[h]);
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const bool raise = highest[h] - rescale_threshold_log2(Element{}) > old[h];  // row by row: bits never depend on neighbours
    rescale.factor[h] = raise ? exp2_approx(old[h] - highest[h]) : 1.0f;
    rows.subtrahend[0][h] = raise ? highest[h] : old[h];
    rows.sum[0][h] *= rescale.factor[h];
    behind |= raise;
  }
  if (careful) rows.set_far();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float subtrahend = rows.subtrahend[0][h] == -INFINITY ? 0.0f : rows.subtrahend[0][h];  // no -inf - -inf
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 2 * h; i < 2 * h + 2; ++i) s[0][n][i] = fmaf(s[0][n][i], scale_log2, -subtrahend);
  }
  rescale.any = any_in_warp(behind);
  return careful;
}

// The first tile of a row block, and any tile in which a row may meet its first key.
template <class Element, int N>
FG_DEVICE Rescale subtract_new_max(float (&s)[1][N][4], LazyRowState& rows, float scale_log2) {
  Rescale rescale;
  if (subtract_maxima<Element>(s, rows, rescale, scale_log2)) {
    const float rest[2] = {rows.is_far(0) ? rows.reference(0) : 0.0f, rows.is_far(1) ? rows.reference(1) : 0.0f};
    subtract_rest(s, rest);
    merge_near(s, rows);
  }
  return rescale;
}

// Any later tile: every row has its reference (default_empty_row_refs).
template <class Element, int N>
FG_DEVICE Rescale subtract_row_ref(float (&s)[1][N][4], const LazyRowState& rows, float scale_log2) {
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) s[0][n][i] = fmaf(s[0][n][i], scale_log2, -rows.subtrahend[0][i / 2]);
  return {};
}

// Any tile, where rows meet their first key at any time: while a row of the warp has yet to, true maxima.
template <class Element, int N>
FG_DEVICE Rescale subtract_max_if_new_row(float (&s)[1][N][4], LazyRowState& rows, float scale_log2) {
  if (any_in_warp(rows.subtrahend[0][0] == -INFINITY || rows.subtrahend[0][1] == -INFINITY)) {
    Rescale rescale;
    subtract_maxima<Element>(s, rows, rescale, scale_log2);  // exp_and_check subtracts far references
    return rescale;
  }
  return subtract_row_ref<Element>(s, rows, scale_log2);
}

// Raises the reference of rows that have passed it to their maximum, and has far ones subtracted. By whole warps, some row of
// which may need it; s as subtract_row_ref left it.
template <class Element, int N>
FG_DEVICE void raise_references(float (&s)[1][N][4], LazyRowState& rows, Rescale& rescale) {
  float rest[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const bool was_far = rows.is_far(h);
    const float old = rows.reference(h), highest = row_max(s, h);
    const bool raise = (was_far ? above(highest, old) : highest) > rescale_threshold_log2(Element{});  // row by row, as above
    const float reference = raise ? usable(was_far ? highest : old + highest) : old;
    const float moved = raise ? reference - old : 0.0f;  // what rounding made of it
    const float factor = exp2_approx(-moved);
    if (raise) rows.set_reference(h, reference);
    rescale.factor[h] *= factor;
    rows.sum[0][h] *= factor;
    rest[h] = !was_far ? moved : reference == -INFINITY ? 0.0f : reference;  // no -inf - -inf
  }
  rows.see_far();
  subtract_rest(s, rest);
  if (any_in_warp(rows.far)) merge_near(s, rows);
  rescale.any = true;
}

// Any later tile, where registers do not hold scores and P at once. P takes the place of the scores, so maxima
// are looked at first: half an instruction more per score, and a vote before the first exponential.
template <class Element, int N>
FG_DEVICE Rescale subtract_and_check(float (&s)[1][N][4], LazyRowState& rows, float scale_log2) {
  Rescale rescale = subtract_row_ref<Element>(s, rows, scale_log2);
  // Of numbers above zero, those of higher value have the higher bits: only "any above rescale_threshold_log2" is asked, so
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
  if (any_in_warp(rows.far || high > float_bits(rescale_threshold_log2(Element{})))) raise_references<Element>(s, rows, rescale);
  return rescale;
}
