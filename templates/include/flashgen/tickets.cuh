// Tickets of a persistent grid: which tile a block takes next, from one counter for all blocks. The counters are zero
// between launches: the last block to finish puts them back.
#pragma once
#include "flashgen/ptx/atomic.cuh"
#include "flashgen/ptx/warp.cuh"

// counters[0]: tickets drawn. counters[1]: blocks that draw no more.
constexpr int TICKET_COUNTERS = 2;

// By a whole warp: one ticket, which only lane 0 gets to know, so that nobody waits for it yet.
FG_DEVICE int draw_ticket(int* counters) {
  return threadIdx.x % WARP_SIZE == 0 ? atom_add_relaxed(counters, 1) : 0;
}

// By one thread of each block, after its last ticket.
FG_DEVICE void return_tickets(int* counters) {
  if (atom_add_acq_rel(counters + 1, 1) == gridDim.x - 1) {
    counters[0] = 0;
    counters[1] = 0;
  }
}
