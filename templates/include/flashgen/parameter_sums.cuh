// Gradients of tensors that a score expression reads, added up in device memory, in fp32 and in any order.
#pragma once
#include "flashgen/ptx/atomic.cuh"
#include "flashgen/ptx/warp.cuh"

// Where elements depend on positions. A lane adds up neighbours that read one element, as those of a key do, or all that
// lie far from the diagonal of a table of distances.
struct SumOfRuns {
  float* element = nullptr;
  float sum = 0.0f;

  FG_DEVICE void add(float* element_here, float x) {
    if (element_here != element) {
      finish();
      element = element_here;
      sum = 0.0f;
    }
    sum += x;
  }
  FG_DEVICE void finish() {
    if (sum != 0.0f) red_add_f32(element, sum);
  }
};

// Where all scores of a warp read one element, it adds once.
struct SumOfWarp {
  float* element = nullptr;
  float sum = 0.0f;

  FG_DEVICE void add(float* element_here, float x) {
    element = element_here;
    sum += x;
  }
  FG_DEVICE void finish() {
#pragma unroll
    for (int lanes = WARP_SIZE / 2; lanes > 0; lanes /= 2) sum += shfl_xor(sum, lanes);
    if (threadIdx.x % WARP_SIZE == 0) red_add_f32(element, sum);
  }
};
