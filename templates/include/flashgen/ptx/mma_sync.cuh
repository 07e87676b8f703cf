// mma.sync m16n8k16 (PTX ISA 9.7.14.5.14): d[16 x 8] += a[16 x 16] * b[16 x 8], 16-bit inputs, fp32 sums.
// Lane l holds of d rows l / 4 (d[0], d[1]) and l / 4 + 8 (d[2], d[3]), columns 2 * (l % 4) and the next.
#pragma once
#include "flashgen/prelude.cuh"

FG_DEVICE void mma_m16n8k16(bf16, float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

FG_DEVICE void mma_m16n8k16(fp16, float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
