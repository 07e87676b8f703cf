// Host twin of ptx/warp.cuh.
#pragma once
#include "flashgen/prelude.cuh"

FG_DEVICE float shfl_xor(float x, int lane_mask) { return emu::shfl_xor(x, lane_mask); }
FG_DEVICE uint32_t shfl_xor(uint32_t x, int lane_mask) {
  return __builtin_bit_cast(uint32_t, emu::shfl_xor(__builtin_bit_cast(float, x), lane_mask));
}
FG_DEVICE int first_lane(int x) { return emu::first_lane(x); }
FG_DEVICE bool any_in_warp(bool x) { return emu::ballot(x) != 0; }
FG_DEVICE int count_in_warp(bool x) { return __builtin_popcount(emu::ballot(x)); }
FG_DEVICE uint32_t lanes_in_warp(bool x) { return emu::ballot(x); }
FG_DEVICE int highest_bit(uint32_t x) { return x == 0 ? -1 : 31 - __builtin_clz(x); }
FG_DEVICE int count_bits(uint32_t x) { return __builtin_popcount(x); }
FG_DEVICE void sync_warp() { emu::sync_warp(); }
FG_DEVICE void sync_block() { emu::sync_block(false); }
FG_DEVICE bool any_in_block(bool x) { return emu::sync_block(x); }
