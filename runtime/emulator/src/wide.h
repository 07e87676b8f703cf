// Functions marked WIDE are compiled twice on x86-64, once for 256-bit registers; the loader picks. The arithmetic is the
// same: fused multiply-adds, which would round differently, are not among what the second may use.
#pragma once
#include <cstddef>

#if defined(__x86_64__) && defined(__GLIBC__)
#define WIDE __attribute__((target_clones("avx2", "default")))
#else
#define WIDE
#endif
