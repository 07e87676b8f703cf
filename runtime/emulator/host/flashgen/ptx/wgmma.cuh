// Host twin of ptx/wgmma.cuh.
#pragma once
#include "flashgen/wgmma_operand.cuh"

// Nothing to pin: arrays that were passed to the emulator live in memory.
FG_DEVICE void pin_registers(float& x) {}
FG_DEVICE void pin_registers(uint32_t& x) {}
FG_DEVICE void pin_registers(uint64_t& x) {}
template <class T, int N>
FG_DEVICE void pin_registers(T (&registers)[N]) {}

template <class... Registers>
FG_DEVICE void wgmma_fence(Registers&... written) {
  (emu::wgmma_fence(&written, sizeof(written)), ...);
}

FG_DEVICE void wgmma_commit() { emu::wgmma_commit(); }

template <int PENDING, class... Registers>
FG_DEVICE void wgmma_wait(Registers&... finished) {
  emu::wgmma_wait(PENDING);
  (emu::wgmma_finished(&finished, sizeof(finished)), ...);
}

constexpr emu::Type emu_type(bf16) { return emu::Type::BF16; }
constexpr emu::Type emu_type(fp16) { return emu::Type::FP16; }
constexpr emu::Type emu_type(e4m3) { return emu::Type::E4M3; }
constexpr emu::Type emu_type(e5m2) { return emu::Type::E5M2; }

template <int N, int A_MAJOR, int B_MAJOR, class Element, int REGISTERS>
FG_DEVICE void wgmma_ss(Element, float (&d)[REGISTERS], uint64_t a, uint64_t b, int scale_d) {
  static_assert(N % 8 == 0 && N >= 8 && N <= 256 && REGISTERS == N / 2, "d[64 x N] over 128 threads");
  emu::wgmma_ss(emu_type(Element{}), N, d, a, A_MAJOR == MN_MAJOR, b, B_MAJOR == MN_MAJOR, scale_d);
}

template <int N, int B_MAJOR, class Element, int REGISTERS>
FG_DEVICE void wgmma_rs(Element, float (&d)[REGISTERS], const uint32_t (&a)[4], uint64_t b, int scale_d) {
  static_assert(N % 8 == 0 && N >= 8 && N <= 256 && REGISTERS == N / 2, "d[64 x N] over 128 threads");
  emu::wgmma_rs(emu_type(Element{}), N, d, a, b, B_MAJOR == MN_MAJOR, scale_d);
}

template <int N, int A_MAJOR, int B_MAJOR, class Element, int REGISTERS, int STEPS>
FG_DEVICE void wgmma_ss(Element, float (&d)[REGISTERS], const uint64_t (&a)[STEPS], const uint64_t (&b)[STEPS], int scale_d) {
  for (int k = 0; k < STEPS; ++k) wgmma_ss<N, A_MAJOR, B_MAJOR>(Element{}, d, a[k], b[k], k > 0 || scale_d);
}

template <int N, int B_MAJOR, class Element, int REGISTERS, int STEPS>
FG_DEVICE void wgmma_rs(Element, float (&d)[REGISTERS], const uint32_t (&a)[STEPS][4], const uint64_t (&b)[STEPS], int scale_d) {
  for (int k = 0; k < STEPS; ++k) wgmma_rs<N, B_MAJOR>(Element{}, d, a[k], b[k], k > 0 || scale_d);
}
