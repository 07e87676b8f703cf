// What fa3's backward adds to the columns of its transposed scores, which are queries: -lse / softmax_scale to S, -delta
// to dP. The terms come as an operand of these products, in three bf16 numbers whose sum is the float, and the other
// operand has ones for them. So no lane loads lse or delta: that was a tenth of what shared memory can do.
#pragma once
#include "flashgen/ptx/convert.cuh"
#include "flashgen/wgmma_operand.cuh"

// Terms of a query, as preprocess writes them; the last of four is 0.
struct alignas(16) RowTerms {
  bf16 lse[4], delta[4];
};

// The bf16 numbers whose sum is x: each has the first 8 bits of what is left. Infinities become NaN.
FG_DEVICE void split_float(bf16 (&parts)[4], float x) {
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    parts[i] = bf16{(uint16_t)((uint32_t)float_bits(x) >> 16)};
    x -= to_float(parts[i]);
  }
  parts[3] = bf16{0};
}

// The terms of ROWS queries in shared memory, as operand b [ROWS][16]. Columns 8 to 15 are columns 0 to 7 once more,
// which meet zeros: no room has to be cleared for them.
template <int ROWS>
struct RowTermsTile {
  static constexpr int BYTES = ROWS * sizeof(RowTerms), FLOATS = sizeof(RowTerms) / 4;
  FG_DEVICE static uint64_t descriptor(const void* tile) {
    return wgmma_descriptor(tile, SWIZZLE_NONE, 0, 8 * sizeof(RowTerms));
  }
};

// Operand a [64][16] for them: ones in the three columns of a term, else zeros. All rows are alike, so it is one core
// matrix of 8 rows for each term, and one of zeros.
constexpr int LSE_TERM = 0, DELTA_TERM = 1;
constexpr int CORE_BYTES = 128;
FG_DEVICE uint64_t ones_descriptor(const unsigned char* ones, int term) {
  return wgmma_descriptor(ones + term * CORE_BYTES, SWIZZLE_NONE, (2 - term) * CORE_BYTES, 0);
}
// By 24 threads or more, `thread` from 0 on.
FG_DEVICE void store_ones(unsigned char* ones, int thread) {
  constexpr uint32_t ONE = 0x3f80, PAIR = ONE << 16 | ONE;
  const uint32_t lse = thread / 8 == LSE_TERM, delta = thread / 8 == DELTA_TERM;
  if (thread < 24) reinterpret_cast<Chunk*>(ones)[thread] = {PAIR * lse, ONE * lse, PAIR * delta, ONE * delta};
}
