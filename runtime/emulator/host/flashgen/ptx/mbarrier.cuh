// Host twin of ptx/mbarrier.cuh.
#pragma once
#include "flashgen/ptx/cluster.cuh"
#include "flashgen/ptx/smem.cuh"

FG_DEVICE void mbarrier_init(uint64_t* barrier, uint32_t arrivals) { emu::mbarrier_init(barrier, arrivals); }
FG_DEVICE void fence_mbarrier_init() { emu::fence_mbarrier_init(); }
FG_DEVICE void mbarrier_arrive(uint64_t* barrier) { emu::mbarrier_arrive(barrier, 0); }
FG_DEVICE void mbarrier_arrive_expect_tx(uint64_t* barrier, uint32_t bytes) { emu::mbarrier_arrive(barrier, bytes); }
FG_DEVICE void mbarrier_arrive_cluster(uint64_t* barrier, uint32_t cta) { emu::mbarrier_arrive_cluster(barrier, cta); }

FG_DEVICE bool mbarrier_try_wait_parity(uint64_t* barrier, uint32_t parity) {
  return emu::mbarrier_try_wait(barrier, parity);
}

FG_DEVICE bool mbarrier_test_wait_parity(uint64_t* barrier, uint32_t parity) {
  return emu::mbarrier_test_wait(barrier, parity);
}

// Not a loop around the above, so that a deadlock is seen at once.
FG_DEVICE void mbarrier_wait_parity(uint64_t* barrier, uint32_t parity) { emu::mbarrier_wait(barrier, parity); }
