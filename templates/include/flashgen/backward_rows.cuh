// What the kernel before a backward pass does with rows of out and dout: 16 bytes of each for every lane of a row.
#pragma once
#include "flashgen/ptx/convert.cuh"
#include "flashgen/ptx/math.cuh"
#include "flashgen/ptx/warp.cuh"

// Products of the eight elements of two chunks, added up.
template <class Element>
FG_DEVICE float dot(Element, const Chunk& a, const Chunk& b) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t x = a.words[i], y = b.words[i];
    sum = fmaf(to_float(Element{(uint16_t)x}), to_float(Element{(uint16_t)y}), sum);
    sum = fmaf(to_float(Element{(uint16_t)(x >> 16)}), to_float(Element{(uint16_t)(y >> 16)}), sum);
  }
  return sum;
}

// The sum of LANES neighbouring lanes, a power of two, in each of them.
template <int LANES>
FG_DEVICE float sum_of_lanes(float x) {
#pragma unroll
  for (int distance = 1; distance < LANES; distance *= 2) x += shfl_xor(x, distance);
  return x;
}
