// Counters and semaphores in device memory, between the blocks of a grid (PTX ISA 9.7.13.5 atom, 9.7.13.6 red,
// 9.7.9 ld and st with a memory order).
#pragma once
#include "flashgen/prelude.cuh"

// atom.add.relaxed: adds and returns what was there. For tile counters: orders nothing else.
FG_DEVICE int atom_add_relaxed(int* counter, int x) {
  int before;
  asm volatile("atom.relaxed.gpu.global.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(x) : "memory");
  return before;
}

// atom.add.acq_rel: writes before it are visible to whoever adds later, and theirs to this thread.
FG_DEVICE int atom_add_acq_rel(int* counter, int x) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(x) : "memory");
  return before;
}

// red.add.release: as above, for those who need no answer.
FG_DEVICE void red_add_release(int* counter, int x) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(counter), "r"(x) : "memory");
}

// red.add.f32: a sum whose order, and so whose last bits, differ from run to run.
FG_DEVICE void red_add_f32(float* sum, float x) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(sum), "f"(x) : "memory");
}

// The same for four sums side by side, 16-byte aligned: each is atomic, all four are not.
FG_DEVICE void red_add_f32x4(float* sums, const float (&x)[4]) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(sums), "f"(x[0]), "f"(x[1]), "f"(x[2]),
               "f"(x[3])
               : "memory");
}

// red.add of two elements at once: what they are is added, wherever else they are cached.
FG_DEVICE void red_add2(bf16, bf16* pair, uint32_t x) {
  asm volatile("red.relaxed.gpu.global.add.noftz.bf16x2 [%0], %1;" ::"l"(pair), "r"(x) : "memory");
}
FG_DEVICE void red_add2(fp16, fp16* pair, uint32_t x) {
  asm volatile("red.relaxed.gpu.global.add.noftz.f16x2 [%0], %1;" ::"l"(pair), "r"(x) : "memory");
}

// ld.acquire: what the writer of this value wrote before is visible after.
FG_DEVICE int ld_acquire(const int* semaphore) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(semaphore) : "memory");
  return value;
}

// st.release: writes before it are visible to whoever acquires the value.
FG_DEVICE void st_release(int* semaphore, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(semaphore), "r"(value) : "memory");
}

// Returns when the semaphore holds `value`. The blocks that bring it there must be running or done.
FG_DEVICE void wait_until_equal(const int* semaphore, int value) {
  while (ld_acquire(semaphore) != value) {
  }
}
