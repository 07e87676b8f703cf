// What softmax_stale.cuh knows of a row: the reference that its weights are measured against, in powers of two, and the sum of
// its weights.
#pragma once
#include "flashgen/softmax.cuh"

// Scores far from zero. A reference R is a rounded number, and fma(s, scale, -R) takes a product that is not: near R it
// gives what the rounding of R left, up to half a unit of R's last place. Weights show that from |R| = 2^13 on (half a unit
// is then 2^-11), and from 2^30 on it empties a row or overflows. Where R is far and s is not, the difference even forgets
// s. So a row whose reference is far subtracts it apart: its products are rounded first, as R is, and the difference of the
// two is exact (subtract_far). The main loop does not know. Its fma subtracts R * 2^-138, which is too little to count and
// still says what R is; and every tile of such a row is looked at again, as if its weights were too high (`far`).
constexpr float FAR_LOG2 = 0x1p13f, FAR_AS_SMALL = 0x1p-10f;  // FAR_LOG2 * 2^-138 is normal; no R * 2^-138 reaches 2^-10
FG_DEVICE bool is_far(float subtrahend) { return subtrahend != 0.0f && fabsf(subtrahend) < FAR_AS_SMALL; }
FG_DEVICE float reference_of(float subtrahend) {
  return is_far(subtrahend) ? subtrahend * 0x1p69f * 0x1p69f : subtrahend;
}
FG_DEVICE float subtrahend_of(float reference) {
  return fabsf(reference) >= FAR_LOG2 ? reference * 0x1p-69f * 0x1p-69f : reference;
}
// The reference to take where `highest` was meant: any near it serves, and these are those of far ones.
FG_DEVICE float usable(float highest) { return fabsf(highest) < FAR_AS_SMALL ? 0.0f : highest; }

// How far `x` is above a reference, both in powers of two. A far reference that a row has come to from a near one may be
// two units of its last place off the products that it was made of (raise_references): what is so near is the same.
FG_DEVICE float above(float x, float reference) {
  const float difference = x - reference;
  return fabsf(difference) < fabsf(reference) * 0x1p-22f ? 0.0f : difference;  // never of an infinite reference
}

struct StaleRows {
  float subtrahend[1][2];  // of products of rows lane / 4 and lane / 4 + 8; -inf: no key seen yet
  float sum[1][2];         // this lane's share of the denominator
  bool far = false;        // whether the reference of one of them is far

  FG_DEVICE StaleRows() : subtrahend{{-INFINITY, -INFINITY}}, sum{{0.0f, 0.0f}} {}
  FG_DEVICE float reference(int h) const { return reference_of(subtrahend[0][h]); }
  FG_DEVICE float reference_log2(int, int h, float) const { return reference(h); }
  // `reference`: a usable one.
  FG_DEVICE void set_reference(int h, float reference) { subtrahend[0][h] = subtrahend_of(reference); }
  FG_DEVICE void see_far() { far = is_far(subtrahend[0][0]) || is_far(subtrahend[0][1]); }
  // A row that has seen no key by now never will: any finite reference serves.
  FG_DEVICE void settle() {
#pragma unroll
    for (int h = 0; h < 2; ++h) subtrahend[0][h] = subtrahend[0][h] == -INFINITY ? 0.0f : subtrahend[0][h];
  }
  // As if both rows had seen a key with this score, in powers of two, and without a value. -inf: none.
  FG_DEVICE void start_with_sink(float sink) {
    const float reference = usable(sink);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      set_reference(h, reference);
      sum[0][h] = sink > -INFINITY && threadIdx.x % 4 == 0 ? exp2_approx(sink - reference) : 0.0f;
    }
    see_far();
  }
};

// What the output so far has to be multiplied with, by row; `any` is the same in all lanes of the warp.
struct Rescale {
  float factor[2] = {1.0f, 1.0f};
  bool any = false;

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
