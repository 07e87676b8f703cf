// Host twin of ptx/convert.cuh.
#pragma once
#include "flashgen/prelude.cuh"

FG_DEVICE uint32_t pack2(bf16, float lo, float hi) { return emu::pack2(emu::Type::BF16, lo, hi); }
FG_DEVICE uint32_t pack2(fp16, float lo, float hi) { return emu::pack2(emu::Type::FP16, lo, hi); }
FG_DEVICE float to_float(bf16 x) { return emu::to_float(emu::Type::BF16, x.bits); }
FG_DEVICE float to_float(fp16 x) { return emu::to_float(emu::Type::FP16, x.bits); }

FG_DEVICE int float_bits(float x) { return __builtin_bit_cast(int, x); }

FG_DEVICE uint32_t fma2(bf16, uint32_t a, uint32_t b, uint32_t c) { return emu::fma2(emu::Type::BF16, a, b, c); }
FG_DEVICE uint32_t fma2(fp16, uint32_t a, uint32_t b, uint32_t c) { return emu::fma2(emu::Type::FP16, a, b, c); }
