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

// fma (PTX ISA 9.7.4.4): a * b + c on both halves of packed pairs, each rounded to nearest even.
FG_DEVICE uint32_t fma2(bf16, uint32_t a, uint32_t b, uint32_t c) {
  uint32_t pair;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(a), "r"(b), "r"(c));
  return pair;
}

FG_DEVICE uint32_t fma2(fp16, uint32_t a, uint32_t b, uint32_t c) {
  uint32_t pair;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(a), "r"(b), "r"(c));
  return pair;
}

// One element to float: exact.
FG_DEVICE float to_float(bf16 x) { return __uint_as_float((uint32_t)x.bits << 16); }

FG_DEVICE float to_float(fp16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}

// The bits of a float as a signed integer: of floats above zero, in the same order.
FG_DEVICE int float_bits(float x) { return __float_as_int(x); }
