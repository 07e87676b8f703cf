// Rows whose output holds an infinity or a NaN, again and by hand. A hidden key has weight 0, and 0 * NaN would still
// poison every row of its tile; the promise is that a non-finite value reaches exactly the rows that see it. The main
// path does not look at values at all: it looks at its output, and comes here in the rare case. One warp, its 16 rows,
// one row at a time, straight from device memory.
#pragma once
#include "flashgen/mask.cuh"
#include "flashgen/ptx/convert.cuh"
#include "flashgen/ptx/math.cuh"
#include "flashgen/softmax.cuh"

// Whether any lane of the warp holds an infinity or a NaN.
template <class Element, int V>
FG_DEVICE bool any_nonfinite(const uint32_t (&w)[V][2]) {
  uint32_t zeros[2] = {};  // pairs that stay 0 but for those: 0 * infinity is NaN
#pragma unroll
  for (int n = 0; n < V; ++n)
#pragma unroll
    for (int h = 0; h < 2; ++h) zeros[h] = fma2(Element{}, w[n][h], 0, zeros[h]);
  return any_in_warp(((zeros[0] | zeros[1]) & 0x7fff7fff) != 0);
}

FG_DEVICE float warp_max(float x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) x = fmaxf(x, shfl_xor(x, mask));
  return x;
}

FG_DEVICE float warp_sum(float x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) x += shfl_xor(x, mask);
  return x;
}

template <int HEAD_DIM, class Element>
FG_DEVICE float dot(const Element* a, const Element* b) {
  float sum = 0.0f;
#pragma unroll 1
  for (int c = 0; c < HEAD_DIM; ++c) sum = fmaf(to_float(a[c]), to_float(b[c]), sum);
  return sum;
}

// One row. `score(raw, key)` is the score that softmax sees, in powers of two.
template <int HEAD_DIM_QK, int HEAD_DIM_V, class Element, class Score>
FG_DEVICE void careful_row(Element* out, const Element* q, const Element* k, int64_t k_row_stride, const Element* v,
                           int64_t v_row_stride, KeyRange keys, Score score) {
  constexpr int COLS_PER_LANE = (HEAD_DIM_V + WARP_SIZE - 1) / WARP_SIZE;
  const int lane = threadIdx.x % WARP_SIZE;
  float highest = -INFINITY, sum = 0.0f, o[COLS_PER_LANE] = {};
#pragma unroll 1
  for (int first = keys.first; first <= keys.last; first += WARP_SIZE) {  // a key per lane
    const int key = first + lane;
    const float x = key <= keys.last ? score(dot<HEAD_DIM_QK>(q, k + key * k_row_stride), key) : -INFINITY;
    const float before = highest;
    highest = fmaxf(highest, warp_max(x));
    const float reference = highest == -INFINITY ? 0.0f : highest;
    const float p = key <= keys.last ? exp2_approx(x - reference) : 0.0f;
    const float rescale = before == -INFINITY ? 0.0f : exp2_approx(before - reference);
    sum = sum * rescale + warp_sum(p);
#pragma unroll
    for (int i = 0; i < COLS_PER_LANE; ++i) o[i] = before == -INFINITY ? 0.0f : o[i] * rescale;
#pragma unroll 1
    for (int other = 0; other < WARP_SIZE && first + other <= keys.last; ++other) {
      const float weight = from_lane(p, other);
#pragma unroll
      for (int i = 0; i < COLS_PER_LANE; ++i) {
        const int col = lane + WARP_SIZE * i;
        if (col < HEAD_DIM_V) {
          const float value = to_float(v[(first + other) * v_row_stride + col]);
          // In exact arithmetic no weight is 0, so a visible infinity always arrives.
          o[i] += value - value == 0.0f ? weight * value : value;
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < COLS_PER_LANE; ++i) {
    const int col = lane + WARP_SIZE * i;
    const float normalised = sum == 0.0f ? 0.0f : o[i] / sum;
    if (col < HEAD_DIM_V) out[col] = Element{(uint16_t)pack2(Element{}, normalised, 0.0f)};
  }
}
