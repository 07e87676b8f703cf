// mma.sync m16n8k16 (PTX ISA 9.7.14.5.14). Sums run in fp32, k upwards; the hardware's order is its own.
#include "machine.h"
#include "numbers.h"

namespace emu {

namespace {

struct Mma {
  Type type;
  float* d;
  const uint32_t* a;
  uint32_t b[2];
};

float half_of(Type type, uint32_t pair, int which) {
  return to_float(type, static_cast<uint16_t>(which == 0 ? pair : pair >> 16));
}

void execute_mma(Warp& warp) {
  float a[16][16], b[16][8], d[16][8];
  for (int lane = 0; lane < WARP_SIZE; ++lane) {
    const auto& mine = *static_cast<const Mma*>(warp.arguments[lane]);
    const int row = lane / 4, col = lane % 4 * 2;
    for (int half = 0; half < 2; ++half) {
      for (int r = 0; r < 4; ++r) a[row + r % 2 * 8][col + r / 2 * 8 + half] = half_of(mine.type, mine.a[r], half);
      for (int r = 0; r < 2; ++r) b[col + r * 8 + half][row] = half_of(mine.type, mine.b[r], half);
      for (int r = 0; r < 2; ++r) d[row + r * 8][col + half] = mine.d[2 * r + half];
    }
  }
  for (int i = 0; i < 16; ++i) {
    for (int k = 0; k < 16; ++k) {
      for (int j = 0; j < 8; ++j) d[i][j] += a[i][k] * b[k][j];
    }
  }
  for (int lane = 0; lane < WARP_SIZE; ++lane) {
    auto& mine = *static_cast<Mma*>(warp.arguments[lane]);
    for (int r = 0; r < 4; ++r) mine.d[r] = d[lane / 4 + r / 2 * 8][lane % 4 * 2 + r % 2];
  }
}

}  // namespace

void mma_m16n8k16(Type type, float* d, const uint32_t* a, uint32_t b0, uint32_t b1) {
  Fiber& fiber = enter(__builtin_return_address(0));
  Mma mma{type, d, a, {b0, b1}};
  meet(fiber, execute_mma, &mma, Kind::TENSOR);
}

}  // namespace emu
