// A logit that joins a row's denominator without a value: the state of a row begins as if it had seen it.
#pragma once
#include "flashgen/softmax.cuh"

// `sink` in natural units. The sum is a quad's, so one of its lanes holds it. -inf: no sink.
template <int M>
FG_DEVICE void start_with_sink(RowState<M>& rows, float sink, float scale_log2) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      rows.max[m][h] = sink * LOG2_E / scale_log2;
      rows.sum[m][h] = sink > -INFINITY && threadIdx.x % 4 == 0 ? 1.0f : 0.0f;
    }
}
