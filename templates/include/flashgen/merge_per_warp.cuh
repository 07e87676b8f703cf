// Merges (combines) the splits of query tiles, a warp at a time. Blocks leave the partial outputs of their splits in device
// memory. A block without work left waits for all splits of some rows and adds them up, in key order: the sum depends
// neither on which block was late nor on which one adds. All blocks must run at once (a cooperative launch), and may wait
// only after their last split, for which other blocks wait.
// A split consists of partial tiles, one for each warp: its 16 rows of the output, with row references and row sums.
#pragma once
#include "flashgen/lazy_rows.cuh"
#include "flashgen/ptx/atomic.cuh"

// Fragments as a warp has them, so that every access is 512 bytes in a row. V: columns / 8.
template <int V>
struct PartialTile {
  Floats4 columns[V][WARP_SIZE];
  Floats4 rows[WARP_SIZE];  // of rows lane / 4 and lane / 4 + 8: references, sums
};

// The warp that holds the rows calls this, after it has added up their sums.
template <int V>
FG_DEVICE void write_partial_tile(PartialTile<V>& partial, const float (&o)[1][V][4], const LazyRowState& rows) {
  const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
  for (int v = 0; v < V; ++v) partial.columns[v][lane] = {{o[0][v][0], o[0][v][1], o[0][v][2], o[0][v][3]}};
  Floats4 state;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float sum = rows.sum[0][h];
    // A split in which the row sees no key must not set the scale for other splits.
    state.values[h] = sum == 0.0f ? -INFINITY : rows.reference(h);
    state.values[2 + h] = sum;
  }
  partial.rows[lane] = state;
}

// Adds a pair of elements to the columns `col` and `col` + 1 of row lane / 4 + 8 * h, by the lane that has them.
template <class Element, int V>
FG_DEVICE void add_to_partial_tile(PartialTile<V>& partial, int h, int col, uint32_t pair) {
  Floats4& fragment = partial.columns[col / 8][threadIdx.x % WARP_SIZE];
  fragment.values[2 * h] += to_float(Element{(uint16_t)pair});
  fragment.values[2 * h + 1] += to_float(Element{(uint16_t)(pair >> 16)});
}

// A warp calls this after its writes, if it has any.
FG_DEVICE void arrive(int* arrivals) {
  sync_warp();
  if (threadIdx.x % WARP_SIZE == 0) red_add_release(arrivals, 1);
}

// A warp calls this. Returns when all `count` splits have arrived, and what their warps wrote can be read.
FG_DEVICE void wait_for_arrivals(const int* arrivals, int count) {
  if (threadIdx.x % WARP_SIZE == 0) wait_until_equal(arrivals, count);
  sync_warp();
}

// Adds up columns 8 * first .. 8 * (first + N) - 1 of the partial tiles of `splits` splits, which lie `stride` partial tiles
// apart. A warp calls this. AT_ONCE splits are read together, so that their latencies overlap.
template <int AT_ONCE, int N, int V>
FG_DEVICE void add_splits(const PartialTile<V>* partial, int64_t stride, int splits, int first, float (&o)[1][N][4],
                          LazyRowState& rows) {
  const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) o[0][n][i] = 0.0f;
#pragma unroll 1
  for (int begin = 0; begin < splits; begin += AT_ONCE) {
    Floats4 states[AT_ONCE], columns[AT_ONCE][N];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      states[i] = {{-INFINITY, -INFINITY, 0.0f, 0.0f}};
      if (begin + i < splits) {
        const PartialTile<V>& next = partial[(begin + i) * stride];
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
      for (int i = 0; i < AT_ONCE; ++i) highest = fmaxf(highest, states[i].values[h]);
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
        if (begin + i >= splits) continue;  // not times 0: what was not written may be a NaN
        const float weight = exp2_approx(above(states[i].values[h], reference));
        rows.sum[0][h] = fmaf(weight, states[i].values[2 + h], rows.sum[0][h]);
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
          for (int j = 2 * h; j < 2 * h + 2; ++j) o[0][n][j] = fmaf(weight, columns[i][n].values[j], o[0][n][j]);
      }
    }
  }
}

// One warp of each block calls this after its last wait. The last block sets `done` and the `count` arrival counts to
// zero, as the next launch expects them.
FG_DEVICE void reset_arrivals(int* done, int* arrivals, int count) {
  const int lane = threadIdx.x % WARP_SIZE;
  const bool last = lane == 0 && atom_add_acq_rel(done, 1) == gridDim.x - 1;
  if (!any_in_warp(last)) return;
  sync_warp();  // all lanes come after what the other blocks did
#pragma unroll 1
  for (int i = lane; i < count; i += WARP_SIZE) arrivals[i] = 0;
  if (lane == 0) *done = 0;
}
