// The scheduler pipeline of a persistent block: one warp publishes work tiles to all other warps. Each is a WorkTileInfo in
// a ring of STAGES in shared memory from SMEM on, with barriers FULL and EMPTY. A negative work_idx ends the work.
#pragma once
#include "flashgen/ring.cuh"

// The producer's side of the pipeline.
template <class WorkTileInfo, int STAGES, int SMEM, int FULL, int EMPTY>
struct WorkProducerOf {
  unsigned char* smem;
  uint64_t* barriers;
  Ring<STAGES> ring;

  // The next stage, once all consumers have released the work tile that it held.
  FG_DEVICE WorkTileInfo& acquire() const {
    ring.wait_empty(barriers + EMPTY);
    return *reinterpret_cast<WorkTileInfo*>(smem + SMEM + ring.stage * sizeof(WorkTileInfo));
  }
  FG_DEVICE void commit() {
    if (threadIdx.x == 0) mbarrier_arrive(barriers + FULL + ring.stage);
    ring.advance();
  }
  // Publishes the end of the work.
  FG_DEVICE void end() {
    WorkTileInfo& last = acquire();
    if (threadIdx.x == 0) last.work_idx = -1;
    commit();
  }
};

// The side of any other warp. A work tile stays in shared memory until the warp releases it: the main loop has no
// registers to spare.
template <class WorkTileInfo, int STAGES, int SMEM, int FULL, int EMPTY>
struct WorkConsumerOf {
  unsigned char* smem;
  uint64_t* barriers;
  Ring<STAGES> ring;

  FG_DEVICE WorkTileInfo& current() const {
    return *reinterpret_cast<WorkTileInfo*>(smem + SMEM + ring.stage * sizeof(WorkTileInfo));
  }
  // Waits for the current work tile. False: the work has ended.
  FG_DEVICE bool wait() const {
    ring.wait_full(barriers + FULL);
    sync_warp();
    return first_lane(current().work_idx) >= 0;
  }
  // Goes to the next work tile. The present one can be read until release_previous.
  FG_DEVICE void advance() { ring.advance(); }
  FG_DEVICE void release_previous() {
    sync_warp();  // all lanes have read it
    const int previous = ring.stage == 0 ? STAGES - 1 : ring.stage - 1;
    if (threadIdx.x % WARP_SIZE == 0) mbarrier_arrive(barriers + EMPTY + previous);
  }
};
