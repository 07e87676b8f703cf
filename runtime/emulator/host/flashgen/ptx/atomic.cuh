// Host twin of ptx/atomic.cuh.
#pragma once
#include "flashgen/prelude.cuh"

FG_DEVICE int atom_add_relaxed(int* counter, int x) { return emu::atom_add(counter, x, false, false); }
FG_DEVICE int atom_add_acq_rel(int* counter, int x) { return emu::atom_add(counter, x, true, true); }
FG_DEVICE void red_add_release(int* counter, int x) { emu::atom_add(counter, x, false, true); }
FG_DEVICE void red_add_f32(float* sum, float x) { emu::red_add_f32(sum, x); }
FG_DEVICE void red_add_f32x4(float* sums, const float (&x)[4]) {
  emu::red_add_f32x4(sums, x[0], x[1], x[2], x[3]);
}
FG_DEVICE void red_add2(bf16, bf16* pair, uint32_t x) { emu::red_add2(emu::Type::BF16, pair, x); }
FG_DEVICE void red_add2(fp16, fp16* pair, uint32_t x) { emu::red_add2(emu::Type::FP16, pair, x); }
FG_DEVICE int ld_acquire(const int* semaphore) { return emu::ld_acquire(semaphore); }
FG_DEVICE void st_release(int* semaphore, int value) { emu::st_release(semaphore, value); }
FG_DEVICE void wait_until_equal(const int* semaphore, int value) { emu::wait_until_equal(semaphore, value); }
