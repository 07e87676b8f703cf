// Warp and block collectives of the CUDA language, by the names of what they do.
#pragma once
#include "flashgen/prelude.cuh"

FG_DEVICE float shfl_xor(float x, int lane_mask) { return __shfl_xor_sync(0xffffffffu, x, lane_mask); }
FG_DEVICE uint32_t shfl_xor(uint32_t x, int lane_mask) { return __shfl_xor_sync(0xffffffffu, x, lane_mask); }
// Lane 0's value, which the compiler then knows to be the same in the whole warp: it can live in a uniform register.
FG_DEVICE int first_lane(int x) { return __shfl_sync(0xffffffffu, x, 0); }
FG_DEVICE bool any_in_warp(bool x) { return __any_sync(0xffffffffu, x); }
FG_DEVICE int count_in_warp(bool x) { return __popc(__ballot_sync(0xffffffffu, x)); }
FG_DEVICE uint32_t lanes_in_warp(bool x) { return __ballot_sync(0xffffffffu, x); }  // a bit for each lane
FG_DEVICE int highest_bit(uint32_t x) { return 31 - __clz(x); }  // its place; -1 of 0
FG_DEVICE int count_bits(uint32_t x) { return __popc(x); }
FG_DEVICE void sync_warp() { __syncwarp(); }  // what a lane wrote before is visible to the others after
FG_DEVICE void sync_block() { __syncthreads(); }
FG_DEVICE bool any_in_block(bool x) { return __syncthreads_or(x); }
