// cp.async.bulk (PTX ISA 9.7.9.25.4): copies of whole byte ranges by TMA, issued by one thread. Addresses
// and sizes are multiples of 16. Loads report to an mbarrier; stores and sums belong to the issuing thread's groups.
#pragma once
#include "flashgen/cache_policy.cuh"
#include "flashgen/ptx/smem.cuh"

// Global to shared. `barrier` gets the bytes; its phase must expect them.
FG_DEVICE void bulk_load(void* smem, const void* gmem, uint32_t bytes, uint64_t* barrier,
                         CachePolicy policy = EVICT_NORMAL) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
      ::"r"(smem_addr(smem)), "l"(gmem), "r"(bytes), "r"(smem_addr(barrier)), "l"((uint64_t)policy)
      : "memory");
}

// Shared to global. Writers of the shared memory fence first (fence_proxy_async_shared).
FG_DEVICE void bulk_store(void* gmem, const void* smem, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(gmem), "r"(smem_addr(smem)),
               "r"(bytes)
               : "memory");
}

// cp.reduce.async.bulk: gmem[i] += smem[i], each sum atomic, in any order.
FG_DEVICE void bulk_reduce_add_f32(float* gmem, const float* smem, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(gmem),
               "r"(smem_addr(smem)), "r"(bytes)
               : "memory");
}

// Closes the group of the stores and sums that this thread issued since the last commit, bulk and tensor alike.
FG_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until at most PENDING of this thread's newest groups are still writing.
template <int PENDING>
FG_DEVICE void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Waits until at most PENDING of them are still reading: the shared memory of the others may be overwritten.
template <int PENDING>
FG_DEVICE void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
