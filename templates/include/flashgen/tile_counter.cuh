// The tile counter of a persistent grid: one counter in device memory, from which all blocks fetch their next work tile.
// Counters are zero between launches: the last block to finish resets them.
#pragma once
#include "flashgen/ptx/atomic.cuh"
#include "flashgen/ptx/warp.cuh"

// counters[0]: work tiles fetched. counters[1]: blocks that fetch no more.
constexpr int TILE_COUNTERS = 2;

// A whole warp calls this: one fetch, whose result only lane 0 receives, so that no other lane waits for it.
FG_DEVICE int fetch_next_work(int* counters) {
  return threadIdx.x % WARP_SIZE == 0 ? atom_add_relaxed(counters, 1) : 0;
}

// One thread of each block calls this after the block's last fetch.
FG_DEVICE void reset_tile_counter(int* counters) {
  if (atom_add_acq_rel(counters + 1, 1) == gridDim.x - 1) {
    counters[0] = 0;
    counters[1] = 0;
  }
}
