// Rows of a decode over a latent cache, row = token * num_heads + head: which keys they see, what becomes of keys that
// only some of them see, and what their sums come to.
#pragma once
#include "flashgen/divisor.cuh"
#include "flashgen/lazy_rows.cuh"
#include "flashgen/nonfinite.cuh"
#include "flashgen/ptx/math.cuh"
#include "flashgen/tile.cuh"

// Of a tile's keys, from its first on, those that a thread's two rows see: `keys` of the request remain, and
// under a causal mask the last p.masked_keys of them come into sight token by token.
struct Visible {
  int keys[2];

  template <class Params>
  FG_DEVICE Visible(const Params& p, int keys, int row) {
#pragma unroll
    for (int h = 0; h < 2; ++h)
      this->keys[h] = keys - max_int(p.masked_keys - (row + 8 * h) / p.num_heads, 0);
  }
};

// Sets the scores of the others to -inf. `col` is that of s[0][0][0].
template <int N>
FG_DEVICE void mask_keys(float (&s)[1][N][4], const Visible& visible, int col) {
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (col + 8 * n + i >= visible.keys[h]) s[0][n][2 * h + i] = -INFINITY;
}

// A value that is infinite or NaN would reach the rows that do not see its key, too: their P is 0, and
// 0 * NaN is not. So zero_nonfinite removes it, and the rows that see it get it from here, by way of their
// sum: they end as NaN. By a warp, for the keys from `first` to `end`, at most 7, that only some rows see.
template <class Element, int PAIRS, class StageIndex>
FG_DEVICE void spread_nonfinite(LazyRowState& rows, unsigned char* smem, const StageIndex& stage, const Visible& visible,
                                int first, int end) {
#pragma unroll 1
  for (int key = first; key < end; ++key) {
    uint32_t found = 0;
#pragma unroll 1
    for (int pair = threadIdx.x % WARP_SIZE; pair < PAIRS; pair += WARP_SIZE)
      found |= nonfinite_bits<Element>(latent_pair(smem, stage, key, pair));
    if (!any_in_warp(found != 0)) continue;
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if (key < visible.keys[h]) rows.sum[0][h] = INFINITY - INFINITY;
  }
}

// By a warpgroup, when no product reads these keys any more.
template <class Element, int PAIRS, class StageIndex>
FG_DEVICE void zero_nonfinite(unsigned char* smem, const StageIndex& stage, int first, int end) {
#pragma unroll 1
  for (int i = threadIdx.x % 128 + first * PAIRS; i < end * PAIRS; i += 128) {
    uint32_t& pair = latent_pair(smem, stage, i / PAIRS, i % PAIRS);
    const uint32_t found = nonfinite_halves<Element>(pair);
    if (found != 0) pair &= ~found;
  }
}

// Rows past a request's last key may hold anything. By a warpgroup.
template <class Tile>
FG_DEVICE void clear_rows(unsigned char* tile, int first) {
  for (int i = threadIdx.x % 128; i < (Tile::ROWS - first) * Tile::CHUNKS; i += 128)
    *reinterpret_cast<Chunk*>(tile + Tile::offset(first + i / Tile::CHUNKS, i % Tile::CHUNKS)) = {};
}

// What a row's sums come to: the factor of its output, and its lse.
struct RowEnd {
  float inverse, lse;
};

template <class Params>
FG_DEVICE RowEnd end_row(const Params& p, int row, float reference, float sum) {
  constexpr float LN_2 = 0.69314718055994531f, LOG2_E = 1.44269504088896341f;
  RowEnd end;
  end.lse = sum == 0.0f ? -INFINITY : (reference + log2_approx(sum)) * LN_2;
  end.inverse = sum == 0.0f ? 0.0f : rcp_approx(sum);
  if (p.sink != nullptr) {
    // Both relative to the higher one; a sink of +inf as if it were finite, or it would be inf - inf.
    constexpr float HIGHEST = 3.0e38f;
    const float sink = p.sink[row % p.num_heads], extra = fminf(sink * LOG2_E, HIGHEST);
    const float highest = fmaxf(reference, extra);
    const float weight = exp2_approx(reference - highest), all = sum * weight + exp2_approx(extra - highest);
    if (sum != 0.0f) end.inverse = weight * rcp_approx(all);
    if (p.lse_counts_sink != 0)
      end.lse = sum == 0.0f ? sink : (fmaxf(reference, sink * LOG2_E) + log2_approx(all)) * LN_2;
  }
  return end;
}

template <class Params>
FG_DEVICE void write_row_lse(const Params& p, int request, int row, float lse) {
  const int token = row / p.num_heads, head = row % p.num_heads;
  p.lse[((int64_t)request * p.num_heads + head) * p.seqlen_q + token] = lse;
}
