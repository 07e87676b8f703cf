// Rows of S and P in device memory, as standard attention stores them: [batch, num_heads_q, seqlen_q, score_cols].
// S is fp32, scaled by softmax_scale * log2(e). Both passes over a row read the same rounded score, so the difference of
// two scores is exact wherever fp32 holds it.
#pragma once
#include "flashgen/ptx/convert.cuh"
#include "flashgen/ptx/math.cuh"
#include "flashgen/ptx/warp.cuh"

struct alignas(8) Floats2 {
  float values[2];
};
struct alignas(8) Elements4 {
  uint32_t pairs[2];
};

// Scales and stores the fragments of 16 rows. This lane's s[0][0][0] goes to `target`; `valid_rows` counts from its row.
template <int N>
FG_DEVICE void store_scores(float* target, int row_stride, const float (&s)[1][N][4], float scale, int valid_rows) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (8 * h >= valid_rows) continue;
#pragma unroll
    for (int n = 0; n < N; ++n)
      *reinterpret_cast<Floats2*>(target + 8 * h * (int64_t)row_stride + 8 * n) =
          Floats2{{s[0][n][2 * h] * scale, s[0][n][2 * h + 1] * scale}};
  }
}

// Maximum of a row and its sum of 2^(score - maximum), in one pass by a warp (Milakov and Gimelshein 2018).
struct RowSum {
  float max = -INFINITY, sum = 0.0f;

  // What scores are relative to: the maximum, or 0 while the row has seen no key, because -inf - -inf is NaN.
  FG_DEVICE float row_ref() const { return max == -INFINITY ? 0.0f : max; }
  FG_DEVICE void raise_max(float highest) {
    const float old = max;
    max = fmaxf(max, highest);
    sum *= exp2_approx(old - row_ref());
  }
  FG_DEVICE void add(const Floats4& scores) {
    const float* const s = scores.values;
    raise_max(fmaxf(fmaxf(s[0], s[1]), fmaxf(s[2], s[3])));
#pragma unroll
    for (int i = 0; i < 4; ++i) sum += exp2_approx(s[i] - row_ref());
  }
  // Every lane then holds the maximum and the sum of the whole row.
  FG_DEVICE void reduce() {
    float highest = max;
#pragma unroll
    for (int lanes = WARP_SIZE / 2; lanes > 0; lanes /= 2) highest = fmaxf(highest, shfl_xor(highest, lanes));
    raise_max(highest);
#pragma unroll
    for (int lanes = WARP_SIZE / 2; lanes > 0; lanes /= 2) sum += shfl_xor(sum, lanes);
  }
  // Natural log of the sum of exp(scores); -inf where the row sees no key.
  FG_DEVICE float lse() const {
    constexpr float LN_2 = 0.69314718055994531f;
    return sum == 0.0f ? -INFINITY : (max + log2_approx(sum)) * LN_2;
  }
};
