// Host twin of ptx/mma_sync.cuh.
#pragma once
#include "flashgen/prelude.cuh"

FG_DEVICE void mma_m16n8k16(bf16, float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  emu::mma_m16n8k16(emu::Type::BF16, d, a, b0, b1);
}

FG_DEVICE void mma_m16n8k16(fp16, float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  emu::mma_m16n8k16(emu::Type::FP16, d, a, b0, b1);
}
