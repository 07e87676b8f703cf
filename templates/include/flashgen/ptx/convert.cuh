// cvt (PTX ISA 9.7.9.21): two floats to a packed pair of 16-bit elements, rounded to nearest even.
#pragma once
#include "flashgen/prelude.cuh"

FG_DEVICE uint32_t pack2(bf16, float lo, float hi) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(hi), "f"(lo));
  return pair;
}

FG_DEVICE uint32_t pack2(fp16, float lo, float hi) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(hi), "f"(lo));
  return pair;
}

// One element to float: exact.
FG_DEVICE float to_float(bf16 x) { return __uint_as_float((uint32_t)x.bits << 16); }

FG_DEVICE float to_float(fp16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
