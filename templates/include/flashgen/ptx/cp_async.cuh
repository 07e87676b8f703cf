// cp.async (PTX ISA 9.7.9.25.3): 16-byte copies from global to shared memory that bypass registers and L1.
#pragma once
#include "flashgen/ptx/smem.cuh"

// Copies 16 bytes. The copy lands some time before the wait that covers its group.
FG_DEVICE void cp_async_16(void* smem, const void* gmem) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(smem_addr(smem)), "l"(gmem) : "memory");
}

// Copies the first `bytes` (0 or 16) and writes zeros to the rest; with 0 the source is not read.
FG_DEVICE void cp_async_16_zfill(void* smem, const void* gmem, uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(smem_addr(smem)), "l"(gmem), "r"(bytes)
               : "memory");
}

// Closes the group of the copies issued since the last commit.
FG_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most PENDING of this thread's newest groups are in flight.
template <int PENDING>
FG_DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
