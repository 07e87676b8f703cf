// Host twin of ptx/setmaxnreg.cuh.
#pragma once
#include "flashgen/prelude.cuh"

template <int REGISTERS>
FG_DEVICE void setmaxnreg_inc() {
  static_assert(REGISTERS % 8 == 0 && REGISTERS >= 24 && REGISTERS <= 256, "multiples of 8 in 24..256");
  emu::setmaxnreg(REGISTERS, true);
}

template <int REGISTERS>
FG_DEVICE void setmaxnreg_dec() {
  static_assert(REGISTERS % 8 == 0 && REGISTERS >= 24 && REGISTERS <= 256, "multiples of 8 in 24..256");
  emu::setmaxnreg(REGISTERS, false);
}
