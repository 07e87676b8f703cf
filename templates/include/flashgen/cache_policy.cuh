// Hints for L2 that go with the copies of TMA. Plain CUDA, so that device and emulator read the same text.
#pragma once
#include "flashgen/prelude.cuh"

// What L2 does with the lines of a copy: operand `cache-policy`, as createpolicy.fractional encodes it for all lines.
enum CachePolicy : uint64_t {
  EVICT_NORMAL = 0x1000000000000000,
  EVICT_FIRST = 0x12F0000000000000,
  EVICT_LAST = 0x14F0000000000000,
};
