// What a block of a decode over a latent cache does: the record that the schedule wrote for the block, the segments that
// the record comes to, and the requests whose keys the block shares with others.
#pragma once
#include "flashgen/prelude.cuh"

// An SM partition: one record of the schedule, what a block does. From tile first_tile of first_request to tile end_tile
// of last_request, for rows row_block * block_rows and on. Block = partition * row_blocks + row_block.
struct SmPartition {
  int first_request, first_tile, last_request, end_tile;  // first_request negative: nothing
  int first_begin, first_end, last_begin, last_end;       // the partitions, inclusive, that share these requests
  int first_keys, last_keys;  // of these requests: the decode need not wait for one more answer from memory
  int row_block, row_blocks, block_rows;
  int unused[3];
};

template <class Params>
FG_DEVICE const SmPartition& sm_partition(const Params& p) {
  return reinterpret_cast<const SmPartition*>(p.schedule)[blockIdx.x];
}

// Tiles of one request, one after the other in a block's stream of tiles. The producer warp publishes each with
// its queries.
struct Segment {
  int request;     // negative: there are no more
  int begin, end;  // in the stream
  int first_tile;  // of the request, that `begin` is
  int keys;        // of the request
  int num_splits, split_idx;  // into how many splits its tiles are cut, and which this is
  int partial;     // the index of the split's partial output
  int first_row, end_row;  // of the block
};

// The segment of `request`, as far as it does not depend on the stream.
template <int BLOCK_N, class Params>
FG_DEVICE Segment segment_of(const Params& p, const SmPartition& partition, int request) {
  const int me = blockIdx.x / partition.row_blocks;
  const bool starts = request == partition.first_request, ends = request == partition.last_request;
  const int keys = starts ? partition.first_keys : ends ? partition.last_keys : p.seqlens[request];
  const int first_partition = starts ? partition.first_begin : ends ? partition.last_begin : me;
  const int last_partition = starts ? partition.first_end : ends ? partition.last_end : me;
  Segment segment;
  segment.request = request;
  segment.keys = keys;
  segment.first_tile = starts ? partition.first_tile : 0;
  segment.begin = 0;
  segment.end = (ends ? partition.end_tile : max_int((keys + BLOCK_N - 1) / BLOCK_N, 1)) - segment.first_tile;
  segment.num_splits = last_partition - first_partition + 1;
  segment.split_idx = me - first_partition;
  // Only its first split can have another request before it.
  segment.partial = 2 * blockIdx.x + (segment.split_idx == 0);
  segment.first_row = partition.row_block * partition.block_rows;
  segment.end_row = min_int(segment.first_row + partition.block_rows, p.q_rows);
  return segment;
}

// Word by word: a wider store needs more registers in a row than the producer warps can spare.
FG_DEVICE void copy_segment(Segment& to, const Segment& segment) {
  volatile int* const words = reinterpret_cast<volatile int*>(&to);
  const int* const from = reinterpret_cast<const int*>(&segment);
#pragma unroll
  for (int i = 0; i < (int)(sizeof(Segment) / sizeof(int)); ++i) words[i] = from[i];
}

// A request that a block shares with others: its first one (`which` 0), or its last (1). num_splits 1: it
// shares none.
struct Split {
  int request, first_partition, num_splits;
};

template <class Params>
FG_DEVICE Split split_of_block(const Params& p, int which) {
  const SmPartition& mine = sm_partition(p);
  if (which == 0) return {mine.first_request, mine.first_begin, mine.first_end - mine.first_begin + 1};
  const bool other = mine.last_request != mine.first_request;
  return {mine.last_request, mine.last_begin, other ? mine.last_end - mine.last_begin + 1 : 1};
}
