// Host twin of ptx/ldmatrix.cuh.
#pragma once
#include "flashgen/ptx/smem.cuh"

FG_DEVICE void ldmatrix_x4(uint32_t (&r)[4], const void* row) { emu::ldmatrix_x4(r, row, false); }
FG_DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) { emu::ldmatrix_x4(r, row, true); }
