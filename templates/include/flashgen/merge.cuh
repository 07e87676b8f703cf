// A query tile whose keys several blocks share out. Each leaves its part in device memory; when a block has no work of
// its own left, it waits for the parts of some rows and adds them up, in the order of the keys: the sum depends neither on
// who was late nor on who adds. All blocks must run at once (a cooperative launch), and may wait only after their last
// part, since others wait for that.
// A part consists of slabs, one for each warp: its 16 rows of the output, with their references and sums.
#pragma once
#include "flashgen/ptx/atomic.cuh"
#include "flashgen/stale_rows.cuh"

struct alignas(16) Floats4 {
  float x[4];
};

// Fragments as a warp has them, so that every access is 512 bytes in a row. V: columns / 8.
template <int V>
struct Slab {
  Floats4 columns[V][WARP_SIZE];
  Floats4 rows[WARP_SIZE];  // of rows lane / 4 and lane / 4 + 8: references, sums
};

// By the warp that has the rows, whose sums are added up.
template <int V>
FG_DEVICE void write_slab(Slab<V>& slab, const float (&o)[1][V][4], const StaleRows& rows) {
  const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
  for (int v = 0; v < V; ++v) slab.columns[v][lane] = {{o[0][v][0], o[0][v][1], o[0][v][2], o[0][v][3]}};
  Floats4 state;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float sum = rows.sum[0][h];
    // A part in which the row sees no key must not set the scale for the others.
    state.x[h] = sum == 0.0f ? -INFINITY : rows.reference(h);
    state.x[2 + h] = sum;
  }
  slab.rows[lane] = state;
}

// Adds a pair of elements to the columns `col` and `col` + 1 of row lane / 4 + 8 * h, by the lane that has them.
template <class Element, int V>
FG_DEVICE void add_to_slab(Slab<V>& slab, int h, int col, uint32_t pair) {
  Floats4& fragment = slab.columns[col / 8][threadIdx.x % WARP_SIZE];
  fragment.x[2 * h] += to_float(Element{(uint16_t)pair});
  fragment.x[2 * h + 1] += to_float(Element{(uint16_t)(pair >> 16)});
}

// By a warp, after what it has to write, if anything.
FG_DEVICE void arrive(int* arrivals) {
  sync_warp();
  if (threadIdx.x % WARP_SIZE == 0) red_add_release(arrivals, 1);
}

// By a warp: returns when all `count` arrivals are there, and what they wrote can be read.
FG_DEVICE void wait_for_arrivals(const int* arrivals, int count) {
  if (threadIdx.x % WARP_SIZE == 0) wait_until_equal(arrivals, count);
  sync_warp();
}

// By a warp: columns 8 * first .. 8 * (first + N) - 1 of the sum of `parts` slabs, which lie `stride` slabs apart.
// AT_ONCE parts are read together, so that the way to device memory is paid once for all of them.
template <int AT_ONCE, int N, int V>
FG_DEVICE void add_parts(const Slab<V>* slab, int64_t stride, int parts, int first, float (&o)[1][N][4], StaleRows& rows) {
  const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) o[0][n][i] = 0.0f;
#pragma unroll 1
  for (int begin = 0; begin < parts; begin += AT_ONCE) {
    Floats4 states[AT_ONCE], columns[AT_ONCE][N];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      states[i] = {{-INFINITY, -INFINITY, 0.0f, 0.0f}};
      if (begin + i < parts) {
        const Slab<V>& next = slab[(begin + i) * stride];
        states[i] = next.rows[lane];
#pragma unroll
        for (int n = 0; n < N; ++n) columns[i][n] = next.columns[first + n][lane];
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float before = rows.reference(h);
      float highest = before;
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) highest = fmaxf(highest, states[i].x[h]);
      const float reference = highest == -INFINITY ? 0.0f : highest;  // no -inf - -inf
      const float factor = exp2_approx(above(before, reference));
      rows.set_reference(h, highest);
      rows.sum[0][h] *= factor;
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 2 * h; i < 2 * h + 2; ++i) o[0][n][i] *= factor;
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        if (begin + i >= parts) continue;  // not times 0: what is not there may be a NaN
        const float weight = exp2_approx(above(states[i].x[h], reference));
        rows.sum[0][h] = fmaf(weight, states[i].x[2 + h], rows.sum[0][h]);
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
          for (int j = 2 * h; j < 2 * h + 2; ++j) o[0][n][j] = fmaf(weight, columns[i][n].x[j], o[0][n][j]);
      }
    }
  }
}

// By one warp of each block, after its last wait: the last block puts `done` and the `count` counters of arrivals back
// to zero, as the next launch expects them.
FG_DEVICE void return_arrivals(int* done, int* arrivals, int count) {
  const int lane = threadIdx.x % WARP_SIZE;
  const bool last = lane == 0 && atom_add_acq_rel(done, 1) == gridDim.x - 1;
  if (!any_in_warp(last)) return;
  sync_warp();  // all lanes come after what the other blocks did
#pragma unroll 1
  for (int i = lane; i < count; i += WARP_SIZE) arrivals[i] = 0;
  if (lane == 0) *done = 0;
}
