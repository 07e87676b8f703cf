// Results of which several blocks have parts: each block leaves its part in device memory, and when all have, each adds up
// its share of the rows. The order of the sums is fixed by the number of parts, never by who came when.
//
// A part: two warpgroups' accumulators of ROWS x COLS as write_fragments leaves them, then a pair (reference, sum) for
// each row. The output of a part is relative to 2^reference; a part in which a row saw no key has reference -inf, sum 0.
#pragma once
#include "flashgen/ptx/atomic.cuh"
#include "flashgen/ptx/convert.cuh"
#include "flashgen/ptx/math.cuh"
#include "flashgen/ptx/named_barrier.cuh"
#include "flashgen/ptx/warp.cuh"

struct alignas(16) Float4 {
  float x[4];
};

// One warpgroup's accumulator: [fragment][thread], so that every access is whole lines.
template <int V>
FG_DEVICE void write_fragments(float* part, const float (&o)[1][V][4]) {
  Float4* const mine = reinterpret_cast<Float4*>(part) + threadIdx.x % 128;
#pragma unroll
  for (int v = 0; v < V; ++v) mine[128 * v] = {o[0][v][0], o[0][v][1], o[0][v][2], o[0][v][3]};
}

// What a row's parts come to: the weight of each, and the reference and the sum of all. By 4 * ROWS threads, `thread` of
// them; `shared` has room for (2 * parts + 9) * ROWS floats, of which the first parts * ROWS are the weights: [part][row].
// `results(i)` points at part i of `parts`. `end(row, reference, sum)` is called once for each row, and gives a factor that
// is left behind the weights.
template <int ROWS, int COLS, int BARRIER, class Results, class End>
FG_DEVICE void weigh_parts(Results results, int parts, int valid_rows, int thread, float* shared, End end) {
  const int row = thread % ROWS, group = thread / ROWS;
  float* const weights = shared + row;
  float* const factor = shared + parts * ROWS + row;
  float* const highest_of = factor + ROWS;
  float* const sum_of = highest_of + 4 * ROWS;
  float* const sums = sum_of + 4 * ROWS;  // [part][row]
  float highest = -INFINITY;
  for (int i = group; i < parts && row < valid_rows; i += 4) {
    const float* const pair = results(i) + 2 * ROWS * COLS + 2 * row;
    const float reference = pair[0];
    weights[i * ROWS] = reference;
    sums[i * ROWS] = pair[1];
    highest = fmaxf(highest, reference);
  }
  highest_of[group * ROWS] = highest;
  bar_sync<BARRIER, 4 * ROWS>();
#pragma unroll
  for (int i = 0; i < 4; ++i) highest = fmaxf(highest, highest_of[i * ROWS]);
  const float finite = highest == -INFINITY ? 0.0f : highest;  // no -inf - -inf
  float sum = 0.0f;
  for (int i = group; i < parts && row < valid_rows; i += 4) {
    const float weight = exp2_approx(weights[i * ROWS] - finite);
    weights[i * ROWS] = weight;
    sum += weight * sums[i * ROWS];
  }
  sum_of[group * ROWS] = sum;
  bar_sync<BARRIER, 4 * ROWS>();
  if (group == 0) *factor = end(row, highest, sum_of[0] + sum_of[ROWS] + sum_of[2 * ROWS] + sum_of[3 * ROWS]);
  bar_sync<BARRIER, 4 * ROWS>();
}

// One fragment of one warp: its first row and column for this lane, and its place in a part.
struct Unit {
  int row, col, place;
};
FG_DEVICE Unit unit_at(int unit, int row_warps, int lane) {
  const int warp = unit % row_warps, fragment = unit / row_warps;
  return {16 * warp + lane / 4, 8 * fragment + 2 * (lane % 4), 128 * fragment + WARP_SIZE * warp + lane};
}

template <int UNITS, int PARTS, class Results>
FG_DEVICE void read_units(Float4 (&y)[UNITS][PARTS], Results results, int parts, const Unit (&units)[UNITS], int part,
                          int step) {
#pragma unroll
  for (int j = 0; j < PARTS; ++j) {
    const Float4* const from = reinterpret_cast<const Float4*>(results(min_int(part + j * step, parts - 1)));
#pragma unroll
    for (int u = 0; u < UNITS; ++u) y[u][j] = from[units[u].place];
  }
}

// Adds up units [begin, end) of all parts, those of warps that have rows. Groups of `sharers` warps take UNITS units at a
// time, each warp every sharers-th part; all loads of UNITS x PARTS come first, so that they wait together, and the first
// of them before `weigh()`. Calls write(row, col, x, y) for pairs of columns.
template <int ROWS, int BARRIER, int UNITS, int PARTS, class Results, class Weigh, class Write>
FG_DEVICE void add_units(Results results, int parts, int begin, int end, int valid_rows, int sharers, const float* weights,
                         Float4* scratch, Weigh weigh, Write write) {
  constexpr int WARPS = 8;
  uint32_t thread = threadIdx.x;
  tie_registers(thread);  // or what follows from it would be worked out before the main loop, which has no registers for it
  const int row_warps = (valid_rows + 15) / 16;  // of each warpgroup, that had rows
  const int warp = first_lane(thread / WARP_SIZE) - 4, lane = thread % WARP_SIZE;
  const int groups = WARPS / sharers, group = warp / sharers, sharer = warp % sharers;
  const float* const factors = weights + parts * ROWS;
  Unit units[UNITS];
  Float4 y[UNITS][PARTS];
  const auto find_units = [&](int first) {
#pragma unroll
    for (int u = 0; u < UNITS; ++u) units[u] = unit_at(min_int(first + group + groups * u, end - 1), row_warps, lane);
  };
  if (begin < end) {
    find_units(begin);
    read_units(y, results, parts, units, sharer, sharers);
  }
  weigh();
  for (int first = begin; first < end; first += groups * UNITS) {
    find_units(first);
    Float4 sum[UNITS] = {};
    for (int i = sharer; i < parts; i += PARTS * sharers) {
      if (first > begin || i > sharer) read_units(y, results, parts, units, i, sharers);
#pragma unroll
      for (int j = 0; j < PARTS; ++j)
#pragma unroll
        for (int u = 0; u < UNITS; ++u)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int row = units[u].row + 8 * h;
            const float weight = i + j * sharers < parts && row < valid_rows ? weights[(i + j * sharers) * ROWS + row] : 0.0f;
            if (weight != 0.0f) {  // a weight of 0 leaves nothing, whatever the part holds
#pragma unroll
              for (int k = 2 * h; k < 2 * h + 2; ++k) sum[u].x[k] = fmaf(weight, y[u][j].x[k], sum[u].x[k]);
            }
          }
    }
    if (sharers > 1) {
#pragma unroll
      for (int u = 0; u < UNITS; ++u) {
        Float4* const all = scratch + warp * WARP_SIZE + lane;
        *all = sum[u];
        bar_sync<BARRIER, 256>();
        for (int i = 1; i < sharers && sharer == 0; ++i)
#pragma unroll
          for (int k = 0; k < 4; ++k) sum[u].x[k] += all[i * WARP_SIZE].x[k];
        bar_sync<BARRIER, 256>();
      }
    }
#pragma unroll
    for (int u = 0; u < UNITS; ++u)
      if (sharer == 0 && first + group + groups * u < end) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int row = units[u].row + 8 * h;
          write(row, units[u].col, sum[u].x[2 * h] * factors[row], sum[u].x[2 * h + 1] * factors[row]);
        }
      }
  }
}

// This block's share, by its two product warpgroups (threads from 128 on): number `part` of `parts`. `shared` has room for
// weigh_parts and then for 256 Float4.
template <int ROWS, int COLS, int BARRIER, class Results, class End, class Write>
FG_DEVICE void merge_share(Results results, int parts, int part, int valid_rows, float* shared, End end_row, Write write) {
  const auto weigh = [&] {
    weigh_parts<ROWS, COLS, BARRIER>(results, parts, valid_rows, threadIdx.x - 128, shared, end_row);
  };
  const int row_warps = (valid_rows + 15) / 16;
  const int units = 2 * COLS / 8 * row_warps;
  const int begin = units * part / parts, end = units * (part + 1) / parts;
  // Few units: several warps share one, each with some of the parts.
  const int sharers = end - begin >= 8 ? 1 : end - begin >= 4 ? 2 : end - begin >= 2 ? 4 : 8;
  Float4* const scratch = reinterpret_cast<Float4*>(shared + (2 * parts + 9) * ROWS);
  static_assert(COLS >= 64, "two parts have enough units for every warp");
  if (parts <= 2)
    add_units<ROWS, BARRIER, 8, 2>(results, parts, begin, end, valid_rows, 1, shared, scratch, weigh, write);
  else
    add_units<ROWS, BARRIER, 2, 8>(results, parts, begin, end, valid_rows, sharers, shared, scratch, weigh, write);
}
