// Warp and block collectives of the CUDA language, by the names of what they do.
#pragma once
#include "flashgen/prelude.cuh"

FG_DEVICE float shfl_xor(float x, int lane_mask) { return __shfl_xor_sync(0xffffffffu, x, lane_mask); }
FG_DEVICE bool any_in_warp(bool x) { return __any_sync(0xffffffffu, x); }
FG_DEVICE int count_in_warp(bool x) { return __popc(__ballot_sync(0xffffffffu, x)); }
FG_DEVICE void sync_block() { __syncthreads(); }
FG_DEVICE bool any_in_block(bool x) { return __syncthreads_or(x); }
