// Which queries a tile has: a group for each of the p.warpgroups consumers. Tiles are counted from the end: where
// they do not divide the queries, the first one has fewer warpgroups at work, since under a causal mask it has the
// fewest keys, and is the last of its head to be taken. `queries_per_warpgroup(p)`, of the rows slot, is the size of a group.
#pragma once
#include "flashgen/divisor.cuh"

// The first group of queries of a tile: each warpgroup has a group.
template <class Params, class TileCoord>
FG_DEVICE int first_group(const Params& p, const TileCoord& w) {
  const int groups = (w.seqlen_q + queries_per_warpgroup(p) - 1) / queries_per_warpgroup(p);
  return groups <= p.warpgroups ? 0 : groups - (64 * (groups - 1) / p.block_rows + 1 - w.m_tile) * p.warpgroups;
}
// The first of a warpgroup's queries; past the end if it has none.
template <class Params, class TileCoord>
FG_DEVICE int first_query(const Params& p, const TileCoord& w, int warpgroup) {
  const int group = first_group(p, w) + warpgroup;
  return group < 0 ? w.seqlen_q : group * queries_per_warpgroup(p);
}
struct QuerySpan {
  int first, last;
};
template <class Params, class TileCoord>
FG_DEVICE QuerySpan queries_of(const Params& p, const TileCoord& w) {
  const int group = first_group(p, w), queries = queries_per_warpgroup(p);
  return {max_int(group, 0) * queries, min_int((group + p.warpgroups) * queries, w.seqlen_q) - 1};
}
