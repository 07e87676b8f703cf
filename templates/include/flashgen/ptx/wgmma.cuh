// wgmma (PTX ISA 9.7.15): d[64 x N] += a[64 x K] * b[K x N] by the four warps of a warpgroup, asynchronously. Operands
// come from shared memory through descriptors, a also from registers; K is 32 bytes of one row. The products themselves
// depend on N and are rendered for the shapes a kernel uses (codegen/wgmma.py); what they share is here.
//
// Thread t of the warpgroup, with w = t / 32, g = t % 32 / 4, q = t % 4 and e elements to 4 bytes (2 or 4), holds
//   in d[i]  row 16 w + g + 8 (i / 2 % 2), column 8 (i / 4) + 2 q + i % 2
//   in a[r]  row 16 w + g + 8 (r % 2), the e elements from k = 4 e (r / 2) + e q on, the first in the low bits
#pragma once
#include "flashgen/wgmma_operand.cuh"

// Pins a register: what was computed into it happens before, what is read from it after.
FG_DEVICE void pin_registers(float& x) { asm volatile("" : "+f"(x)::"memory"); }
FG_DEVICE void pin_registers(uint32_t& x) { asm volatile("" : "+r"(x)::"memory"); }
FG_DEVICE void pin_registers(uint64_t& x) { asm volatile("" : "+l"(x)::"memory"); }
template <class T, int N>
FG_DEVICE void pin_registers(T (&registers)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) pin_registers(registers[i]);
}

// wgmma.fence: before the first product, and before any product whose registers were written since the last fence.
// Lists those: accumulators and fragments of a.
template <class... Registers>
FG_DEVICE void wgmma_fence(Registers&... written) {
  (pin_registers(written), ...);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// wgmma.commit_group: closes the group of the products issued since the last commit.
FG_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// wgmma.wait_group: returns when at most PENDING of the newest groups are unfinished. Lists the registers that become
// free to read (accumulators) or to write (fragments of a) by it.
template <int PENDING, class... Registers>
FG_DEVICE void wgmma_wait(Registers&... finished) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
  (pin_registers(finished), ...);
}

// wgmma.mma_async with a and b in shared memory, STEPS times: d = a[0] * b[0] + a[1] * b[1] + ... + (scale_d ? d : 0). d
// belongs to the products from here to the wait that covers them. Only the shapes a kernel was rendered for exist.
template <int N, int A_MAJOR, int B_MAJOR, class Element, int REGISTERS, int STEPS>
FG_DEVICE void wgmma_ss(Element, float (&d)[REGISTERS], const uint64_t (&a)[STEPS], const uint64_t (&b)[STEPS], int scale_d) = delete;

// The same with a in registers, which belong to the products as well.
template <int N, int B_MAJOR, class Element, int REGISTERS, int STEPS>
FG_DEVICE void wgmma_rs(Element, float (&d)[REGISTERS], const uint32_t (&a)[STEPS][4], const uint64_t (&b)[STEPS], int scale_d) = delete;

// One step.
template <int N, int A_MAJOR, int B_MAJOR, class Element, int REGISTERS>
FG_DEVICE void wgmma_ss(Element, float (&d)[REGISTERS], uint64_t a, uint64_t b, int scale_d) {
  const uint64_t a_step[1] = {a}, b_step[1] = {b};
  wgmma_ss<N, A_MAJOR, B_MAJOR>(Element{}, d, a_step, b_step, scale_d);
}
template <int N, int B_MAJOR, class Element, int REGISTERS>
FG_DEVICE void wgmma_rs(Element, float (&d)[REGISTERS], const uint32_t (&a)[4], uint64_t b, int scale_d) {
  const uint32_t a_step[1][4] = {{a[0], a[1], a[2], a[3]}};
  const uint64_t b_step[1] = {b};
  wgmma_rs<N, B_MAJOR>(Element{}, d, a_step, b_step, scale_d);
}
