// Host twin of ptx/math.cuh: correctly rounded where the device approximates.
#pragma once
#include "flashgen/prelude.cuh"

FG_DEVICE float exp2_approx(float x) { return emu::exp2_ftz(x); }
FG_DEVICE float rcp_approx(float x) { return emu::rcp_ftz(x); }
FG_DEVICE float log2_approx(float x) { return emu::log2_ftz(x); }
