// Special functions of the multi-function unit (PTX ISA 9.7.3), each one instruction.
#pragma once
#include "flashgen/prelude.cuh"

// ex2.approx.ftz: 2^x, relative error at most 2^-22.5; 2^-inf = 0.
FG_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// rcp.approx.ftz: 1 / x, relative error at most 2^-23; 1 / inf = 0.
FG_DEVICE float rcp_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// lg2.approx.ftz: log2(x), absolute error at most 2^-22 near 1, relative 2^-22 elsewhere.
FG_DEVICE float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
