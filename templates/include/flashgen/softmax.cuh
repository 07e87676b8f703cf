// Online softmax (Milakov and Gimelshein 2018) on the score fragments of one warp, base 2.
// A row is shared by the four lanes of a quad; row_sum stays per lane and is added up once, at the end.
#pragma once
#include "flashgen/ptx/math.cuh"
#include "flashgen/ptx/warp.cuh"

// The maximum that scores are measured against is raised only when it falls behind by more than this many powers of
// two. The result is the same in exact arithmetic, since numerator and denominator share the reference; p stays below
// 2^8, which bf16 and fp16 hold as precisely as numbers below 1; and most tiles skip the rescaling of o.
constexpr float RESCALE_THRESHOLD_LOG2 = 8.0f;

constexpr float LOG2_E = 1.44269504088896340736f;

template <int M>
struct RowState {
  float max[M][2];  // unscaled score that exponents are measured against, of rows l / 4 and l / 4 + 8
  float sum[M][2];  // this lane's share of the denominator

  FG_DEVICE RowState() {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        max[m][h] = -INFINITY;
        sum[m][h] = 0.0f;
      }
  }
  FG_DEVICE float reference_log2(int m, int h, float scale_log2) const { return max[m][h] * scale_log2; }
};

FG_DEVICE float quad_max(float x) {
  x = fmaxf(x, shfl_xor(x, 1));
  return fmaxf(x, shfl_xor(x, 2));
}

FG_DEVICE float quad_sum(float x) {
  x += shfl_xor(x, 1);
  return x + shfl_xor(x, 2);
}

// Raises the reference of the rows that a tile of scores leaves behind by more than `threshold_log2`, and rescales what
// they have summed so far. With a threshold of 0 the reference is the running maximum.
template <int M, int N, int V>
FG_DEVICE void raise_max(const float (&s)[M][N][4], float (&o)[M][V][4], RowState<M>& rows, float scale_log2,
                         float threshold_log2 = RESCALE_THRESHOLD_LOG2) {
  float tile_max[M][2];
  bool behind = false;
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float x = fmaxf(s[m][0][2 * h], s[m][0][2 * h + 1]);
#pragma unroll
      for (int n = 1; n < N; ++n) x = fmaxf(x, fmaxf(s[m][n][2 * h], s[m][n][2 * h + 1]));
      tile_max[m][h] = quad_max(x);
      behind |= (tile_max[m][h] - rows.max[m][h]) * scale_log2 > threshold_log2;
    }
  if (any_in_warp(behind)) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        // Row by row, so that a row's bits never depend on its neighbours.
        if ((tile_max[m][h] - rows.max[m][h]) * scale_log2 > threshold_log2) {
          const float rescale = exp2_approx((rows.max[m][h] - tile_max[m][h]) * scale_log2);
          rows.max[m][h] = tile_max[m][h];
          rows.sum[m][h] *= rescale;
#pragma unroll
          for (int v = 0; v < V; ++v) {
            o[m][v][2 * h] *= rescale;
            o[m][v][2 * h + 1] *= rescale;
          }
        }
      }
  }
}

// Without a softmax P is the scores themselves: those of masked keys become zero.
template <int M, int N>
FG_DEVICE void zero_masked_scores(float (&s)[M][N][4]) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) s[m][n][i] = s[m][n][i] == -INFINITY ? 0.0f : s[m][n][i];
}

// From here on (in powers of two) the rounding of a product shows beside one that is not rounded: 2^-11.
constexpr float FAR_LOG2 = 0x1p13f;

// Turns s into p = 2^(scale_log2 * (s - max)) and adds it to the row sums.
template <int M, int N>
FG_DEVICE void exponentiate(float (&s)[M][N][4], RowState<M>& rows, float scale_log2) {
  float reference[M][2];
  bool far = false;
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // A row that has seen no key yet has max -inf, as has one whose scores overflow in powers of two; 0 in its place
      // keeps -inf - -inf out of the exponent.
      const float max_log2 = rows.max[m][h] * scale_log2;
      reference[m][h] = max_log2 == -INFINITY ? 0.0f : max_log2;
      far |= fabsf(reference[m][h]) >= FAR_LOG2;
    }
  if (any_in_warp(far)) {  // such rows subtract before they multiply, which is exact
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const bool here = fabsf(reference[m][h]) >= FAR_LOG2;
        reference[m][h] = here ? 0.0f : reference[m][h];
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
          for (int i = 2 * h; i < 2 * h + 2; ++i) s[m][n][i] -= here ? rows.max[m][h] : 0.0f;
      }
  }
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 2 * h; i < 2 * h + 2; ++i) {
          s[m][n][i] = exp2_approx(fmaf(s[m][n][i], scale_log2, -reference[m][h]));
          sum += s[m][n][i];
        }
      rows.sum[m][h] += sum;
    }
}
