// What score and mask expressions call (codegen/expr/cuda.py). Everything here is total: nothing traps.
#pragma once
#include "flashgen/ptx/math.cuh"

// Arithmetic of ints wraps, as in numpy and torch; signed overflow in C++ would be undefined.
FG_DEVICE int wrap_add(int a, int b) { return (int)((uint32_t)a + (uint32_t)b); }
FG_DEVICE int wrap_sub(int a, int b) { return (int)((uint32_t)a - (uint32_t)b); }
FG_DEVICE int wrap_mul(int a, int b) { return (int)((uint32_t)a * (uint32_t)b); }
FG_DEVICE int abs_int(int a) { return a < 0 ? wrap_sub(0, a) : a; }

FG_DEVICE int64_t min_long(int64_t a, int64_t b) { return a < b ? a : b; }
FG_DEVICE int64_t max_long(int64_t a, int64_t b) { return a > b ? a : b; }

// Quotient rounded down and the remainder that goes with it, which has the divisor's sign. Both are 0 for b = 0.
FG_DEVICE int floor_div(int a, int b) {
  if (b == 0) return 0;
  if (b == -1) return wrap_sub(0, a);
  return a / b - (a % b != 0 && (a % b < 0) != (b < 0));
}
FG_DEVICE int floor_mod(int a, int b) {
  if (b == 0 || b == -1) return 0;
  const int rest = a % b;
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}

// The nearest index inside a dimension.
FG_DEVICE int clamp_index(int i, int size) { return max_int(min_int(i, size - 1), 0); }

FG_DEVICE float sigmoid(float x) { return rcp_approx(1.0f + exp2_approx(x * -1.44269504f)); }

// Below 0.625 an odd polynomial, since 1 - 2 / (e^2x + 1) cancels there; above, an e^2x of infinity gives 1.
FG_DEVICE float tanh_accurate(float x) {
  const float a = fabsf(x), s = x * x;
  const float tail = 1.0f - 2.0f * rcp_approx(exp2_approx(a * 2.88539008f) + 1.0f);
  const float p = fmaf(fmaf(fmaf(0.0151599031f, s, -0.0519202389f), s, 0.133075118f), s, -0.333322942f);
  return a < 0.625f ? fmaf(x * s, p, x) : copysignf(tail, x);
}
