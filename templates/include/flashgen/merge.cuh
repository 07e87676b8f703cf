// A query tile whose keys several blocks share out: each leaves its part in device memory, and the one that comes last
// adds all parts up, its own read back like the others, in the order of the keys: the sum does not depend on who was
// last. A part is one float per thread and register, so every access is a full line.
#pragma once
#include "flashgen/ptx/atomic.cuh"
#include "flashgen/ptx/named_barrier.cuh"
#include "flashgen/softmax_stale.cuh"

constexpr int WARPGROUP_THREADS = 128;

// `part` points at one warpgroup's part: V * 4 of o, two references and two sums for each of its threads.
template <int V>
FG_DEVICE void write_part(float* part, const float (&o)[1][V][4], const StaleRows& rows) {
  float* const mine = part + threadIdx.x % WARPGROUP_THREADS;
#pragma unroll
  for (int i = 0; i < 4 * V; ++i) mine[i * WARPGROUP_THREADS] = o[0][i / 4][i % 4];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float sum = quad_sum(rows.sum[0][h]);
    // A part in which the row sees no key must not set the scale for the others.
    mine[(4 * V + h) * WARPGROUP_THREADS] = sum == 0.0f ? -INFINITY : rows.reference[0][h];
    mine[(4 * V + 2 + h) * WARPGROUP_THREADS] = sum;
  }
}

// o and rows become those of all `parts` parts, which lie `stride` floats apart. Sums are then whole in lane 0 of each
// quad and 0 in the others, as if every lane had its share.
template <int V>
FG_DEVICE void add_parts(const float* part, int64_t stride, int parts, float (&o)[1][V][4], StaleRows& rows) {
  const float* const first = part + threadIdx.x % WARPGROUP_THREADS;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float highest = -INFINITY;
    for (int i = 0; i < parts; ++i) highest = fmaxf(highest, first[i * stride + (4 * V + h) * WARPGROUP_THREADS]);
    rows.reference[0][h] = highest == -INFINITY ? 0.0f : highest;
    rows.sum[0][h] = 0.0f;
  }
#pragma unroll
  for (int v = 0; v < V; ++v)
#pragma unroll
    for (int i = 0; i < 4; ++i) o[0][v][i] = 0.0f;
#pragma unroll 1
  for (int i = 0; i < parts; ++i) {
    const float* const next = first + i * stride;
    float weight[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      weight[h] = exp2_approx(next[(4 * V + h) * WARPGROUP_THREADS] - rows.reference[0][h]);
      if (threadIdx.x % 4 == 0) rows.sum[0][h] += weight[h] * next[(4 * V + 2 + h) * WARPGROUP_THREADS];
    }
#pragma unroll
    for (int j = 0; j < 4 * V; ++j) {
      float& sum = o[0][j / 4][j % 4];
      sum = fmaf(next[j * WARPGROUP_THREADS], weight[j / 2 % 2], sum);
    }
  }
}

// Whether this warpgroup is the last of `parts` to have written its part. `arrivals` is zero again afterwards; `said` is
// a word of shared memory that is this warpgroup's.
FG_DEVICE bool last_to_arrive(int* arrivals, int parts, int* said, int named_barrier) {
  bar_sync_at<WARPGROUP_THREADS>(named_barrier);  // all threads have written
  if (threadIdx.x % WARPGROUP_THREADS == 0) {
    const bool last = atom_add_acq_rel(arrivals, 1) == parts - 1;
    if (last) *arrivals = 0;
    *said = last;
  }
  bar_sync_at<WARPGROUP_THREADS>(named_barrier);
  return *said != 0;
}
