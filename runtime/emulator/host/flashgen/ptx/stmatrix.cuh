// Host twin of ptx/stmatrix.cuh.
#pragma once
#include "flashgen/ptx/smem.cuh"

FG_DEVICE void stmatrix_x4(void* row, const uint32_t (&r)[4]) { emu::stmatrix_x4(row, r, false); }
FG_DEVICE void stmatrix_x4_trans(void* row, const uint32_t (&r)[4]) { emu::stmatrix_x4(row, r, true); }
