// mbarrier (PTX ISA 9.7.13.15): a barrier object of 8 bytes in shared memory. A phase ends when all expected arrivals
// have come and all expected bytes have landed. A fresh object is in a phase of parity 0, so a wait for parity 0 waits
// for the first phase and a wait for parity 1 returns at once.
#pragma once
#include "flashgen/ptx/cluster.cuh"
#include "flashgen/ptx/smem.cuh"

// mbarrier.init: every phase expects `arrivals` arrivals. One thread, once, before anybody uses the object.
FG_DEVICE void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_addr(barrier)), "r"(arrivals) : "memory");
}

// fence.mbarrier_init: shows this thread's inits to the async proxy and the cluster. A block (or cluster) barrier
// follows.
FG_DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// mbarrier.arrive: one arrival; what this thread wrote before is visible to whoever waits.
FG_DEVICE void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_addr(barrier)) : "memory");
}

// mbarrier.arrive.expect_tx: one arrival, and the phase also waits for `bytes` bytes of asynchronous copies.
FG_DEVICE void mbarrier_arrive_expect_tx(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_addr(barrier)), "r"(bytes)
               : "memory");
}

// mbarrier.arrive on the object at the same place in block `cta` of the cluster (which may be this one). It orders
// accesses within this block only: enough to say "I have read it" before a copy overwrites, and a release at cluster
// scope would wait for every write of the thread.
FG_DEVICE void mbarrier_arrive_cluster(uint64_t* barrier, uint32_t cta) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(smem_addr_in_cta(barrier, cta)) : "memory");
}

// mbarrier.try_wait.parity: whether the phase of this parity has ended. May sleep for a while first.
FG_DEVICE bool mbarrier_try_wait_parity(uint64_t* barrier, uint32_t parity) {
  uint32_t ended;
  asm volatile(
      "{\n"
      ".reg .pred ended;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 ended, [%1], %2;\n"
      "selp.u32 %0, 1, 0, ended;\n"
      "}"
      : "=r"(ended)
      : "r"(smem_addr(barrier)), "r"(parity)
      : "memory");
  return ended != 0;
}

// mbarrier.test_wait.parity: the same, and never sleeps.
FG_DEVICE bool mbarrier_test_wait_parity(uint64_t* barrier, uint32_t parity) {
  uint32_t ended;
  asm volatile(
      "{\n"
      ".reg .pred ended;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 ended, [%1], %2;\n"
      "selp.u32 %0, 1, 0, ended;\n"
      "}"
      : "=r"(ended)
      : "r"(smem_addr(barrier)), "r"(parity)
      : "memory");
  return ended != 0;
}

// Returns when the phase of this parity has ended.
FG_DEVICE void mbarrier_wait_parity(uint64_t* barrier, uint32_t parity) {
  while (!mbarrier_try_wait_parity(barrier, parity)) {
  }
}
