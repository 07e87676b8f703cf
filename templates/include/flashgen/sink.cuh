// A logit that joins a row's denominator without a value: the state of a row begins as if it had seen it.
#pragma once
#include "flashgen/prelude.cuh"

// `sink` in the units of the references. A sum is a quad's, so one of its lanes holds the 1. -inf: no sink.
template <int M>
FG_DEVICE void start_with_sink(float (&reference)[M][2], float (&sum)[M][2], float sink) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      reference[m][h] = sink;
      sum[m][h] = sink > -INFINITY && threadIdx.x % 4 == 0 ? 1.0f : 0.0f;
    }
}
