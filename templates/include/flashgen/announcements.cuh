// How one warp of a persistent block announces units of work to the others: each unit is an `Assignment` in a ring of
// STAGES in shared memory from SMEM on, with barriers FULL and EMPTY. A negative `unit` says that there is no more.
#pragma once
#include "flashgen/ring.cuh"

// The announcing warp's way through the ring.
template <class Assignment, int STAGES, int SMEM, int FULL, int EMPTY>
struct AnnouncementsOf {
  unsigned char* smem;
  uint64_t* barriers;
  Ring<STAGES> ring;

  // The next assignment, once everybody is done with what was announced there before.
  FG_DEVICE Assignment& free() const {
    ring.wait_empty(barriers + EMPTY);
    return *reinterpret_cast<Assignment*>(smem + SMEM + ring.stage * sizeof(Assignment));
  }
  FG_DEVICE void announce() {
    if (threadIdx.x == 0) mbarrier_arrive(barriers + FULL + ring.stage);
    ring.advance();
  }
  // Announces that there is no more.
  FG_DEVICE void end() {
    Assignment& last = free();
    if (threadIdx.x == 0) last.unit = -1;
    announce();
  }
};

// Another warp's way through the ring. What a warp needs of an assignment waits in shared memory until the warp is done
// with it: the main loop has no registers to spare.
template <class Assignment, int STAGES, int SMEM, int FULL, int EMPTY>
struct AssignmentsOf {
  unsigned char* smem;
  uint64_t* barriers;
  Ring<STAGES> ring;

  FG_DEVICE Assignment& current() const {
    return *reinterpret_cast<Assignment*>(smem + SMEM + ring.stage * sizeof(Assignment));
  }
  // Whether there is work in the current assignment, once it is announced.
  FG_DEVICE bool more() const {
    ring.wait_full(barriers + FULL);
    sync_warp();
    return first_lane(current().unit) >= 0;
  }
  // To the next assignment; the current one can be read until release_previous.
  FG_DEVICE void advance() { ring.advance(); }
  FG_DEVICE void release_previous() {
    sync_warp();  // all lanes have read it
    const int previous = ring.stage == 0 ? STAGES - 1 : ring.stage - 1;
    if (threadIdx.x % WARP_SIZE == 0) mbarrier_arrive(barriers + EMPTY + previous);
  }
};
