// ldmatrix (PTX ISA 9.7.14.5.15): four 8x8 matrices of 16-bit elements from shared memory into the fragments of mma.
#pragma once
#include "flashgen/ptx/smem.cuh"

// Lane l gives the address of row l % 8 of matrix l / 8; afterwards r[i] holds elements (l / 4, 2 * (l % 4) .. + 1)
// of matrix i.
FG_DEVICE void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(smem_addr(row))
               : "memory");
}

// As above with each matrix transposed: r[i] holds elements (2 * (l % 4) .. + 1, l / 4).
FG_DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(smem_addr(row))
               : "memory");
}
