// The state of a row in softmax_lazy.cuh: the row reference, to which its P is relative, in powers of two, and the row sum
// of P.
#pragma once
#include "flashgen/softmax.cuh"

// Scores far from zero. A reference R is a rounded number, and fma(s, scale, -R) takes a product that is not: near R it
// gives what the rounding of R left, up to half a unit of R's last place. P shows that from |R| = 2^13 on (half a unit
// is then 2^-11), and from 2^30 on it empties a row or overflows. Where R is far and s is not, the difference even forgets
// s. So a row whose reference is far subtracts it apart: its products are rounded first, as R is, and the difference of the
// two is exact (subtract_new_max, raise_references). The main loop does not know. Its fma subtracts R * 2^-138, which is too
// little to count and still says what R is; and every tile of such a row is looked at again, as if its P were too
// high (`far`).
constexpr float FAR_AS_SMALL = 0x1p-10f;  // FAR_LOG2 * 2^-138 is normal, and no R * 2^-138 reaches this
constexpr float NEAR = 0x1p-22f;          // of a number: two to four units of its last place
// (Both sides of each choice are worked out, so that it is no branch.)
FG_DEVICE bool is_far_subtrahend(float x) { return (x != 0.0f) & (fabsf(x) < FAR_AS_SMALL); }
constexpr float UNSEEN = -0x1p-126f;  // as if of a far reference, but of none: the row has seen no key yet
FG_DEVICE float reference_of(float subtrahend) {
  const float far = subtrahend == UNSEEN ? -INFINITY : subtrahend * 0x1p69f * 0x1p69f;
  return is_far_subtrahend(subtrahend) ? far : subtrahend;
}
FG_DEVICE float subtrahend_of(float reference) {
  const float small = reference * 0x1p-69f * 0x1p-69f;
  return fabsf(reference) >= FAR_LOG2 ? small : reference;
}
// Whether a reference may be taken as it is: it is neither far nor so small that it would look like one. Infinite ones may.
FG_DEVICE bool is_plain(float reference) {
  const float size = fabsf(reference);
  return ((size >= FAR_AS_SMALL) & (size < FAR_LOG2)) | (size == 0.0f) | (size == INFINITY);
}
// The reference to take where `highest` was meant: any near it serves, and these are those of far ones.
FG_DEVICE float usable(float highest) { return fabsf(highest) < FAR_AS_SMALL ? 0.0f : highest; }

// How far `x` is above a reference, both in powers of two. A far reference that a row has come to from a near one may be
// two units of its last place off the products that it was made of (raise_references): what is so near is the same.
FG_DEVICE float above(float x, float reference) {
  const float difference = x - reference;
  return fabsf(difference) < fabsf(reference) * NEAR ? 0.0f : difference;  // never of an infinite reference
}

struct LazyRowState {
  float subtrahend[1][2];  // of products of rows lane / 4 and lane / 4 + 8; -inf: no key seen yet
  float sum[1][2];         // this lane's share of the denominator
  bool far = false;        // whether the reference of one of them is far

  FG_DEVICE LazyRowState() : subtrahend{{-INFINITY, -INFINITY}}, sum{{0.0f, 0.0f}} {}
  // Rows for subtract_and_check alone, whose first tile is one of rows with a far reference.
  FG_DEVICE static LazyRowState unseen() {
    LazyRowState rows;
    rows.subtrahend[0][0] = rows.subtrahend[0][1] = UNSEEN;
    rows.far = true;
    return rows;
  }
  FG_DEVICE bool is_far(int h) const { return is_far_subtrahend(subtrahend[0][h]); }
  FG_DEVICE float reference(int h) const { return reference_of(subtrahend[0][h]); }
  FG_DEVICE float reference_log2(int, int h, float) const { return reference(h); }
  // `reference`: a usable one.
  FG_DEVICE void set_reference(int h, float reference) { subtrahend[0][h] = subtrahend_of(reference); }
  // Where the subtrahends are references so far.
  FG_DEVICE void set_far() {
#pragma unroll
    for (int h = 0; h < 2; ++h) set_reference(h, subtrahend[0][h]);
    see_far();
  }
  FG_DEVICE void see_far() { far = is_far(0) || is_far(1); }
  // A row that has seen no key by now never will: any finite reference serves.
  FG_DEVICE void default_empty_row_refs() {
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
