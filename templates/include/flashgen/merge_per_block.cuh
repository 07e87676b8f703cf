// Merges (combines) the splits of a request, a block at a time: each block leaves the partial output of its split in device
// memory, and when all have done so, each merges some of the rows. The number of splits alone decides the order of sums.
//
// A split: two warpgroups' accumulators of ROWS x COLS as write_fragments leaves them, then a pair (reference, sum) for
// each row. The output of a split is relative to 2^reference; a split in which a row saw no key has reference -inf, sum 0.
#pragma once
#include "flashgen/lazy_rows.cuh"
#include "flashgen/ptx/atomic.cuh"
#include "flashgen/ptx/convert.cuh"
#include "flashgen/ptx/named_barrier.cuh"

struct alignas(16) Float4 {
  float x[4];
};

// One warpgroup's accumulator: [fragment][thread], so that every access is whole lines.
template <int V>
FG_DEVICE void write_fragments(float* partial, const float (&o)[1][V][4]) {
  Float4* const mine = reinterpret_cast<Float4*>(partial) + threadIdx.x % 128;
#pragma unroll
  for (int v = 0; v < V; ++v) mine[128 * v] = {o[0][v][0], o[0][v][1], o[0][v][2], o[0][v][3]};
}

// What a row's splits come to: the weight of each, and the reference and the sum of all. By 4 * ROWS threads, `thread` of
// them; `shared` has room for (2 * splits + 10) * ROWS floats, of which the first splits * ROWS are the weights: [split][row].
// Behind them are left zeros, and then the factors: [row]. `results(i)` points at split i of `splits`. `end(row, reference,
// sum)` is called once for each row, and gives its factor.
template <int ROWS, int COLS, int BARRIER, class Results, class End>
FG_DEVICE void weigh_splits(Results results, int splits, int valid_rows, int thread, float* shared, End end) {
  const int row = thread % ROWS, group = thread / ROWS;
  float* const weights = shared + row;
  float* const factor = shared + (splits + 1) * ROWS + row;
  float* const highest_of = factor + ROWS;
  float* const sum_of = highest_of + 4 * ROWS;
  float* const sums = sum_of + 4 * ROWS;  // [split][row]
  float highest = -INFINITY;
  for (int i = group; i < splits; i += 4) {
    const float* const pair = results(i) + 2 * ROWS * COLS + 2 * row;
    const float reference = row < valid_rows ? pair[0] : -INFINITY;  // other rows hold anything
    weights[i * ROWS] = reference;
    sums[i * ROWS] = row < valid_rows ? pair[1] : 0.0f;
    highest = fmaxf(highest, reference);
  }
  if (group == 0) weights[splits * ROWS] = 0.0f;
  highest_of[group * ROWS] = highest;
  bar_sync<BARRIER, 4 * ROWS>();
#pragma unroll
  for (int i = 0; i < 4; ++i) highest = fmaxf(highest, highest_of[i * ROWS]);
  const float finite = highest == -INFINITY ? 0.0f : highest;  // no -inf - -inf
  float sum = 0.0f;
  for (int i = group; i < splits; i += 4) {
    const float weight = exp2_approx(above(weights[i * ROWS], finite));
    weights[i * ROWS] = weight;
    sum += weight * sums[i * ROWS];
  }
  sum_of[group * ROWS] = sum;
  bar_sync<BARRIER, 4 * ROWS>();
  if (group == 0) *factor = end(row, highest, sum_of[0] + sum_of[ROWS] + sum_of[2 * ROWS] + sum_of[3 * ROWS]);
  bar_sync<BARRIER, 4 * ROWS>();
}

// One fragment of one warp: its first row and column for this lane, and its place in a split.
struct Unit {
  int row, col, place;
};
FG_DEVICE Unit unit_at(int unit, int row_warps, int inverse, int lane) {
  const int fragment = unit * inverse >> 16, warp = unit - fragment * row_warps;  // unit / row_warps and the rest
  return {16 * warp + lane / 4, 8 * fragment + 2 * (lane % 4), 128 * fragment + WARP_SIZE * warp + lane};
}

// Which units and parts are read together. Eight units of two splits, or two units of eight splits: the loads, the sums and
// what is done with them are the same text, since compiling it twice takes long. Read number i is of sum i % 8.
struct Reads {
  static constexpr int COUNT = 16, SUMS = 8;
  int units_log2;  // 3, or 1: then four sums are of the same unit
  int step;        // from split to split

  FG_DEVICE int split(int first, int i) const { return first + (i >> units_log2) * step; }
  FG_DEVICE int splits() const { return (COUNT >> units_log2) * step; }
  FG_DEVICE int unit(int sum) const { return sum & ((1 << units_log2) - 1); }
};

template <class Results>
FG_DEVICE void read_units(Float4 (&y)[Reads::COUNT], Results results, const Reads& reads, int splits, const Unit (&units)[Reads::SUMS],
                          int first) {
#pragma unroll
  for (int i = 0; i < Reads::COUNT / 2; ++i) {  // two in a row are of the same split
    const Float4* const from = reinterpret_cast<const Float4*>(results(min_int(reads.split(first, 2 * i), splits - 1)));
    y[2 * i] = from[units[2 * i % Reads::SUMS].place];
    y[2 * i + 1] = from[units[(2 * i + 1) % Reads::SUMS].place];
  }
}

template <int ROWS>
FG_DEVICE void add_units(Float4 (&sum)[Reads::SUMS], const Float4 (&y)[Reads::COUNT], const Reads& reads, int splits,
                         const Unit (&units)[Reads::SUMS], int first, const float* weights) {
#pragma unroll
  for (int i = 0; i < Reads::COUNT; ++i) {
    const Unit& unit = units[i % Reads::SUMS];
    const float* const split_weights = weights + min_int(reads.split(first, i), splits) * ROWS;  // past the last: zeros
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float weight = split_weights[unit.row + 8 * h];
      if (weight != 0.0f) {  // a weight of 0 leaves nothing, whatever the split holds
#pragma unroll
        for (int k = 2 * h; k < 2 * h + 2; ++k) sum[i % Reads::SUMS].x[k] = fmaf(weight, y[i].x[k], sum[i % Reads::SUMS].x[k]);
      }
    }
  }
}

FG_DEVICE void add(Float4& x, const Float4& y) {
#pragma unroll
  for (int k = 0; k < 4; ++k) x.x[k] += y.x[k];
}

// This block's share, by its two consumer warpgroups (threads from 128 on): number `split` of `splits`. Groups of `sharers`
// warps take some units at a time, each warp every sharers-th split; all reads come first, so that they wait together, and
// the first of them before the weights are known. Calls write(row, col, x, y) for pairs of columns. `shared` has room for
// weigh_splits and then for 512 Float4.
template <int ROWS, int COLS, int BARRIER, class Results, class End, class Write>
FG_DEVICE void merge_rows(Results results, int splits, int split_idx, int valid_rows, float* shared, End end_row,
                          Write write) {
  constexpr int WARPS = 8;
  uint32_t thread = threadIdx.x;
  pin_registers(thread);  // or what follows from it would be worked out before the main loop, which has no registers for it
  const int warp = first_lane(thread / WARP_SIZE) - 4, lane = thread % WARP_SIZE;
  const int row_warps = (valid_rows + 15) / 16;  // of each warpgroup, that had rows
  const int all_units = 2 * COLS / 8 * row_warps, inverse = 65536 / row_warps + 1;  // exact for so few units
  const int begin = all_units * split_idx / splits, end = all_units * (split_idx + 1) / splits;
  static_assert(COLS >= 64, "two splits have enough units for every warp");
  // Few units: several warps share one, each with some of the splits.
  const int sharers = splits <= 2 || end - begin >= 8 ? 1 : end - begin >= 4 ? 2 : end - begin >= 2 ? 4 : 8;
  const Reads reads{splits <= 2 ? 3 : 1, sharers};
  const int groups = WARPS / sharers, group = warp / sharers, sharer = warp % sharers;
  const float* const factors = shared + (splits + 1) * ROWS;
  Float4* const scratch = reinterpret_cast<Float4*>(shared + (2 * splits + 10) * ROWS) + warp * WARP_SIZE + lane;
  Unit units[Reads::SUMS];
  Float4 y[Reads::COUNT];
  const auto find_units = [&](int first) {
#pragma unroll
    for (int i = 0; i < Reads::SUMS; ++i)
      units[i] = unit_at(min_int(first + group + groups * reads.unit(i), end - 1), row_warps, inverse, lane);
  };
  if (begin < end) {
    find_units(begin);
    read_units(y, results, reads, splits, units, sharer);
  }
  weigh_splits<ROWS, COLS, BARRIER>(results, splits, valid_rows, threadIdx.x - 128, shared, end_row);
#pragma unroll 1
  for (int first = begin; first < end; first += groups << reads.units_log2) {
    find_units(first);
    Float4 sum[Reads::SUMS] = {};
#pragma unroll 1
    for (int i = sharer; i < splits; i += reads.splits()) {
      if (first > begin || i > sharer) read_units(y, results, reads, splits, units, i);
      add_units<ROWS>(sum, y, reads, splits, units, i, shared);
    }
    if (reads.units_log2 == 1) {
#pragma unroll
      for (int i = 2; i < Reads::SUMS; ++i) add(sum[i % 2], sum[i]);
    }
    if (sharers > 1) {  // these are all units: there is no next round to write there
#pragma unroll
      for (int u = 0; u < 2; ++u) scratch[WARPS * WARP_SIZE * u] = sum[u];
      bar_sync<BARRIER, 256>();
#pragma unroll 1
      for (int i = 1; i < sharers && sharer == 0; ++i)
#pragma unroll
        for (int u = 0; u < 2; ++u) add(sum[u], scratch[WARPS * WARP_SIZE * u + WARP_SIZE * i]);
    }
    const int last = sharer == 0 ? min_int(end, first + (groups << reads.units_log2)) : 0;
#pragma unroll
    for (int u = 0; u < Reads::SUMS; ++u)
      if (first + group + groups * u < last) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int row = units[u].row + 8 * h;
          write(row, units[u].col, sum[u].x[2 * h] * factors[row], sum[u].x[2 * h + 1] * factors[row]);
        }
      }
  }
}
