// The queries that see a key, an interval that moves right with the key (a queries slot's `seeing_queries`), and what
// follows for a tile of keys: the reverse of mask.cuh.
#pragma once
#include "flashgen/prelude.cuh"

struct QueryRange {
  int begin, end;  // positions, [begin, end)
};

// Query tiles of one tile of keys: [begin, end). In those of [full_begin, full_end) every query sees every key.
struct QueryTiles {
  int begin, full_begin, full_end, end;
};

// `first` and `last`: what sees the first and the last existing key of the tile.
template <int BLOCK_M>
FG_DEVICE QueryTiles query_tiles(QueryRange first, QueryRange last, int seqlen_q) {
  QueryTiles tiles;
  tiles.begin = first.begin / BLOCK_M;
  tiles.end = last.end > first.begin ? (last.end + BLOCK_M - 1) / BLOCK_M : tiles.begin;
  tiles.full_begin = clamp_int((last.begin + BLOCK_M - 1) / BLOCK_M, tiles.begin, tiles.end);
  // The last tile may be cut by the end of the queries, whose rows have no part in any sum: that leaves it whole.
  tiles.full_end = first.end == seqlen_q ? tiles.end : clamp_int(first.end / BLOCK_M, tiles.full_begin, tiles.end);
  return tiles;
}

FG_DEVICE bool holds(QueryRange queries, int q_pos) { return queries.begin <= q_pos && q_pos < queries.end; }
