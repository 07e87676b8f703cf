// setmaxnreg (PTX ISA 9.7.19): moves registers between the warpgroups of a block. By all warps of a warpgroup, in a
// kernel with __launch_bounds__(threads, 1).
#pragma once
#include "flashgen/prelude.cuh"

// setmaxnreg.inc: blocks until the block's pool can raise each thread to REGISTERS.
template <int REGISTERS>
FG_DEVICE void setmaxnreg_inc() {
  static_assert(REGISTERS % 8 == 0 && REGISTERS >= 24 && REGISTERS <= 256, "multiples of 8 in 24..256");
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// setmaxnreg.dec: gives up what each thread holds beyond REGISTERS.
template <int REGISTERS>
FG_DEVICE void setmaxnreg_dec() {
  static_assert(REGISTERS % 8 == 0 && REGISTERS >= 24 && REGISTERS <= 256, "multiples of 8 in 24..256");
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
