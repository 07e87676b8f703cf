// Philox4x32-10: random numbers from a counter and a key (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as
// easy as 1, 2, 3", 2011). No state: whoever knows both makes the same bits.
#pragma once
#include "flashgen/prelude.cuh"

struct Philox4 {
  uint32_t words[4];
};

FG_DEVICE Philox4 philox(Philox4 counter, uint32_t key0, uint32_t key1) {
  constexpr int ROUNDS = 10;
  constexpr uint32_t MULTIPLIER0 = 0xD2511F53u, MULTIPLIER1 = 0xCD9E8D57u;
  constexpr uint32_t KEY_STEP0 = 0x9E3779B9u, KEY_STEP1 = 0xBB67AE85u;  // golden ratio, square root of 3 less 1
#pragma unroll
  for (int round = 0; round < ROUNDS; ++round) {
    const uint64_t a = (uint64_t)MULTIPLIER0 * counter.words[0], b = (uint64_t)MULTIPLIER1 * counter.words[2];
    counter = {{(uint32_t)(b >> 32) ^ counter.words[1] ^ (key0 + round * KEY_STEP0), (uint32_t)b,
                (uint32_t)(a >> 32) ^ counter.words[3] ^ (key1 + round * KEY_STEP1), (uint32_t)a}};
  }
  return counter;
}
