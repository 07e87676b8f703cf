// Division by a number that the host knows: three instructions instead of some twenty-five, which also take the compiler's
// time. The host works the multiplier out (runtime/launch/kernel.py). Granlund and Montgomery, Division by Invariant Integers
// using Multiplication, PLDI 1994, theorem 4.2.
#pragma once
#include "flashgen/prelude.cuh"

struct Divisor {
  int32_t value;        // at least 1
  uint32_t multiplier;  // 2^(31 + shift) / value, rounded up: below 2^32
  uint32_t shift;       // log2(value), rounded up

  FG_DEVICE operator int() const { return value; }
};

// Of n in [0, 2^31).
FG_DEVICE int operator/(int n, const Divisor& by) { return (uint64_t)(2 * (uint32_t)n) * by.multiplier >> 32 >> by.shift; }
FG_DEVICE int operator%(int n, const Divisor& by) { return n - n / by * by.value; }
