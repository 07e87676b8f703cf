// Host twin of ptx/convert.cuh.
#pragma once
#include "flashgen/prelude.cuh"

FG_DEVICE uint32_t pack2(bf16, float lo, float hi) { return emu::pack2(emu::Type::BF16, lo, hi); }
FG_DEVICE uint32_t pack2(fp16, float lo, float hi) { return emu::pack2(emu::Type::FP16, lo, hi); }
FG_DEVICE float to_float(bf16 x) { return emu::to_float(emu::Type::BF16, x.bits); }
FG_DEVICE float to_float(fp16 x) { return emu::to_float(emu::Type::FP16, x.bits); }
