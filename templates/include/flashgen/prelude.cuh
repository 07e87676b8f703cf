// Integer names, element types and the qualifiers every other header uses. Nothing outside flashgen is included,
// because NVRTC ships without headers and their set changes between its versions.
#pragma once

#ifdef __CUDACC_RTC__
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#else
#include <stdint.h>
#endif

#define FG_DEVICE __device__ __forceinline__

#ifdef __CUDACC_RTC__
#define INFINITY __int_as_float(0x7f800000)
#endif

// Element types carry bits only; conversions and products are PTX wrappers (ptx/).
struct bf16 {
  uint16_t bits;
  static constexpr uint32_t EXPONENT = 0x7f80;  // all ones there: infinity or NaN
};
struct fp16 {
  uint16_t bits;
  static constexpr uint32_t EXPONENT = 0x7c00;
};

struct alignas(16) Chunk {  // 16 bytes, eight elements: the unit of every copy
  uint32_t words[4];
};

struct alignas(16) Floats4 {
  float values[4];
};

constexpr int ELEMENTS_PER_CHUNK = 8;
constexpr int CHUNK_BYTES = 16;
constexpr int WARP_SIZE = 32;

FG_DEVICE int min_int(int a, int b) { return a < b ? a : b; }
FG_DEVICE int max_int(int a, int b) { return a > b ? a : b; }
FG_DEVICE int clamp_int(int x, int lo, int hi) { return min_int(max_int(x, lo), hi); }
