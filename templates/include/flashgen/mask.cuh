// Masks whose visible keys are, for every query row, one interval that moves right with the row (a mask slot's
// `visible_keys`). Tile ranges and the predicate both come from that one function, so they cannot disagree.
#pragma once
#include "flashgen/ptx/warp.cuh"

struct KeyRange {
  int first, last;  // positions, inclusive; empty when last < first
};

// KV tiles of one query tile: [begin, end). Those in [full_begin, full_end) are seen whole by every row and need no
// mask. In the tiles before `met` every row has seen its first key, if it sees any.
struct KvTiles {
  int begin, full_begin, full_end, end, met;
};

// `top` and `bottom` are the visible keys of the tile's first and last existing row.
template <int BLOCK_N>
FG_DEVICE KvTiles kv_tiles(KeyRange top, KeyRange bottom) {
  KvTiles tiles;
  tiles.begin = top.first / BLOCK_N;
  tiles.end = max_int(bottom.last / BLOCK_N + 1, tiles.begin);
  if (bottom.last < 0) tiles.end = tiles.begin;  // -1 / BLOCK_N rounds to zero
  tiles.full_end = clamp_int((top.last + 1) / BLOCK_N, tiles.begin, tiles.end);
  tiles.met = bottom.first / BLOCK_N + 1;
  tiles.full_begin = clamp_int((bottom.first + BLOCK_N - 1) / BLOCK_N, tiles.begin, tiles.full_end);
  return tiles;
}

FG_DEVICE bool holds(KeyRange keys, int kv_pos) { return keys.first <= kv_pos && kv_pos <= keys.last; }

// Of the mask slot: whether a row with these keys sees the key at `col`, both counted from the same place.
FG_DEVICE bool sees(KeyRange keys, int col);

// Sets the scores of masked keys to -inf. `q_pos` and `kv_pos` are those of this lane's element s[0][0][0];
// `visible(q_pos)` is the slot's function.
template <int M, int N, class Visible>
FG_DEVICE void mask_scores(float (&s)[M][N][4], int q_pos, int kv_pos, Visible visible) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const KeyRange keys = visible(q_pos + 16 * m + 8 * h);
      const KeyRange here = {keys.first - kv_pos, keys.last - kv_pos};  // so that columns are constants
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (!sees(here, 8 * n + i)) s[m][n][2 * h + i] = -INFINITY;
    }
}
