// stmatrix (PTX ISA 9.7.14.5.16): four 8x8 matrices of 16-bit elements from fragments to shared memory, the way back of
// ldmatrix.
#pragma once
#include "flashgen/ptx/smem.cuh"

// Lane l gives the address of row l % 8 of matrix l / 8; r[i] holds elements (l / 4, 2 * (l % 4) .. + 1) of matrix i.
FG_DEVICE void stmatrix_x4(void* row, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem_addr(row)), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// As above with each matrix transposed: r[i] holds elements (2 * (l % 4) .. + 1, l / 4).
FG_DEVICE void stmatrix_x4_trans(void* row, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem_addr(row)),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
