// Dropout of weights. Which are kept hangs on the seed and on their place alone: query head, query and key. So forward
// and backward make the same choice, whatever their tiles.
//
// A weight takes 16 random bits, and Philox gives eight of them. These are for two queries, r and r + 8, and for four
// keys, 2c, 2c + 1, 2c + 8 and 2c + 9, of 16 queries and 16 keys: what a lane of mma.sync holds of that fragment.
// Query half q, key half k and the key's lowest bit e find their bits in half k of word 2 * e + q.
#pragma once
#include "flashgen/philox.cuh"
#include "flashgen/ptx/warp.cuh"

struct Dropout {
  uint32_t key0, key1, offset;  // of the call
  uint32_t bound;               // a weight is kept whose bits, above 16 others, are at most this number

  // `last`: the last of the 16-bit numbers that keep a weight.
  FG_DEVICE Dropout(const int64_t* seed, uint32_t last)
      : key0(first_lane((int)seed[0])), key1(first_lane((int)(seed[0] >> 32))), offset(first_lane((int)seed[1])),
        bound(last << 16 | 0xffffu) {}

  // `row`: the first of the two queries, counted over all sequences; `kv_pos`: of the four keys, any.
  FG_DEVICE Philox4 bits(int head, uint32_t row, int kv_pos) const {
    return philox({{(uint32_t)(kv_pos / 16 * 4 + kv_pos % 8 / 2), row, (uint32_t)head, offset}}, key0, key1);
  }
  FG_DEVICE bool keeps(uint32_t word, int half) const { return (half ? word : word << 16) <= bound; }
};

// Sets dropped weights to zero: queries are rows, `row` and `kv_pos` those of this lane's p[0][0][0].
template <int M, int N>
FG_DEVICE void drop(float (&p)[M][N][4], const Dropout& dropout, int head, uint32_t row, int kv_pos) {
  static_assert(N % 2 == 0, "fragments of 16 keys");
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < N; ++n) {
      if (n % 2) continue;
      const Philox4 bits = dropout.bits(head, row + 16 * m, kv_pos + 8 * n);
#pragma unroll
      for (int q = 0; q < 2; ++q)
#pragma unroll
        for (int e = 0; e < 2; ++e)
#pragma unroll
          for (int k = 0; k < 2; ++k)
            if (!dropout.keeps(bits.words[2 * e + q], k)) p[m][n + k][2 * q + e] = 0.0f;
    }
}

template <int M, int N>
FG_DEVICE void scale_all(float (&x)[M][N][4], float scale) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) x[m][n][i] *= scale;
}
