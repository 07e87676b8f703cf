// What names a wgmma operand: element types, majors, swizzles and the descriptor of one in shared memory. Plain CUDA, so
// that device and emulator read the same text.
#pragma once
#include "flashgen/ptx/smem.cuh"

// 8-bit element types beside those of prelude.cuh.
struct e4m3 {
  unsigned char bits;
};
struct e5m2 {
  unsigned char bits;
};

// Which dimension is contiguous in shared memory: K, or the other one (M of a, N of b; 16-bit types only).
enum Major : int { K_MAJOR = 0, MN_MAJOR = 1 };

// Width of the rows of a panel and of their swizzle; the value is the descriptor's field.
enum Swizzle : int { SWIZZLE_NONE = 0, SWIZZLE_128B = 1, SWIZZLE_64B = 2, SWIZZLE_32B = 3 };

// Matrix descriptor (PTX ISA 9.7.15.5.1) of the operand that starts at `tile`. Core matrix: 8 rows of 16 bytes. "Next"
// below is in bytes; the tile is aligned for its swizzle (8 rows), then base offset 0 holds for every start inside it.
//                      leading_bytes                              stride_bytes
//   K-major, swizzled  not used                                   next 8 rows
//   K-major, none      next core matrix along K                   next 8 rows
//   MN-major, swizzled next panel along M or N                    next 8 along K
//   MN-major, none     next 8 along K                             next 8 along M or N
FG_DEVICE uint64_t wgmma_descriptor(const void* tile, Swizzle swizzle, uint32_t leading_bytes, uint32_t stride_bytes) {
  return (uint64_t)(smem_addr(tile) >> 4 & 0x3fff) | (uint64_t)(leading_bytes >> 4 & 0x3fff) << 16 |
         (uint64_t)(stride_bytes >> 4 & 0x3fff) << 32 | (uint64_t)swizzle << 62;
}

// The descriptor of the operand `bytes` further on, within shared memory.
FG_DEVICE uint64_t wgmma_descriptor_advance(uint64_t descriptor, uint32_t bytes) { return descriptor + (bytes >> 4); }
// ... or `count` times BYTES further on, for a count known only at run time.
template <int BYTES>
FG_DEVICE uint64_t wgmma_descriptor_advance(uint64_t descriptor, int count) {
  static_assert(BYTES % 16 == 0, "addresses in a descriptor count 16 bytes");
  return descriptor + (uint32_t)(count * (BYTES / 16));
}
