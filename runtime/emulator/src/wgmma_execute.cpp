// The arithmetic of wgmma: operands out of shared memory by their descriptors (PTX ISA 9.7.15.5.1), products in fp32.
#include <cstring>

#include "memory.h"
#include "numbers.h"
#include "wgmma.h"
#include "wide.h"

namespace emu {

namespace {

constexpr int M = 64, MAX_N = 256;
constexpr int K_BYTES = 32;
constexpr int CHUNK = 16;

int element_bytes(Type type) { return type == Type::BF16 || type == Type::FP16 ? 2 : 1; }

// Address of the 16 bytes that hold element (mn, k): consecutive along K, or along M or N.
uint32_t chunk_address(uint64_t descriptor, bool mn_major, int mn_chunk, int mn, int k_chunk, int k) {
  const auto start = static_cast<uint32_t>(descriptor & 0x3fff) << 4;
  const auto leading = static_cast<uint32_t>(descriptor >> 16 & 0x3fff) << 4;
  const auto stride = static_cast<uint32_t>(descriptor >> 32 & 0x3fff) << 4;
  constexpr int WIDTHS[4] = {1, 8, 4, 2};  // chunks in a row of the swizzle
  const int width = WIDTHS[descriptor >> 62];
  uint32_t address = start;
  if (!mn_major) {
    address += mn / 8 * stride + mn % 8 * CHUNK * width + k_chunk * (width == 1 ? leading : CHUNK);
  } else if (width == 1) {
    address += mn_chunk * stride + k % 8 * CHUNK + k / 8 * leading;
  } else {
    address += mn_chunk % width * CHUNK + mn_chunk / width * leading + k % 8 * CHUNK * width + k / 8 * stride;
  }
  address &= 0x3ffff;
  return address ^ (address >> 7 & static_cast<uint32_t>(width - 1)) << 4;
}

class Operand {
 public:
  Operand(Warpgroup& warpgroup, const Product& product, uint64_t descriptor, bool mn_major)
      : warpgroup_(warpgroup), product_(product), descriptor_(descriptor), mn_major_(mn_major) {}

  // Row `mn` of the operand, K elements. `past`: that of the threads that must have seen what is read.
  void load(float* to, int row_stride, int rows, int first_row, const VectorClock& past) const {
    const int size = element_bytes(product_.type), per_chunk = CHUNK / size, depth = K_BYTES / size;
    for (int mn = first_row; mn < first_row + rows; mn += mn_major_ ? per_chunk : 1) {
      for (int k = 0; k < depth; k += mn_major_ ? 1 : per_chunk) {
        const uint32_t address = chunk_address(descriptor_, mn_major_, mn / 8, mn, k / per_chunk, k);
        const unsigned char* const chunk = read(address, past);
        for (int i = 0; i < per_chunk; ++i) {
          const float x = element(chunk, i, size);
          to[mn_major_ ? (mn + i) * row_stride + k : mn * row_stride + k + i] = x;
        }
      }
    }
  }

 private:
  const unsigned char* read(uint32_t address, const VectorClock& past) const {
    Fiber& first = warpgroup_.cta->fibers[warpgroup_.first_thread];
    const unsigned char* const p = warpgroup_.cta->smem + (static_cast<int64_t>(address) - SMEM_WINDOW);
    const Moment now{warpgroup_.cta->cluster->group, product_.moment, product_.pc, warpgroup_.agent, false};
    const uint32_t before = first.pc;
    first.pc = product_.pc;
    check(first, {now, &past, true}, p, CHUNK, Access::READ);
    first.pc = before;
    return p;
  }

  float element(const unsigned char* chunk, int i, int size) const {
    uint16_t bits = chunk[i * size];
    if (size == 2) memcpy(&bits, chunk + 2 * i, 2);
    return to_float(product_.type, bits);
  }

  Warpgroup& warpgroup_;
  const Product& product_;
  uint64_t descriptor_;
  bool mn_major_;
};

void load_fragments(const Product& product, float* a, int depth) {
  const int size = element_bytes(product.type), per_word = 4 / size;
  for (int t = 0; t < WARPGROUP_SIZE; ++t) {
    for (int r = 0; r < 4; ++r) {
      const int row = t / 32 * 16 + t % 32 / 4 + r % 2 * 8, column = r / 2 * 4 * per_word + t % 4 * per_word;
      for (int e = 0; e < per_word; ++e) {
        const uint32_t bits = product.fragments[t][r] >> (8 * size * e);
        a[row * depth + column + e] = to_float(product.type, static_cast<uint16_t>(size == 2 ? bits : bits & 0xff));
      }
    }
  }
}

// d = a * b^T of rows of `depth` elements. Each sum begins with 0 and runs in order of k; columns run side by side.
WIDE void multiply(const float* a, const float* b, float* d, int n, int depth) {
  static float columns[K_BYTES * MAX_N];
  for (int j = 0; j < n; ++j) {
    for (int k = 0; k < depth; ++k) columns[k * n + j] = b[j * depth + k];
  }
  for (int i = 0; i < M; ++i) {
    float* const sums = d + i * n;
    for (int j = 0; j < n; ++j) sums[j] = 0.0f;
    for (int k = 0; k < depth; ++k) {
      const float factor = a[i * depth + k];
      const float* const column = columns + k * n;
      for (int j = 0; j < n; ++j) sums[j] += factor * column[j];
    }
  }
}

}  // namespace

void execute_product(Warpgroup& warpgroup) {
  Product& product = *warpgroup.products[warpgroup.executed - warpgroup.base];
  const int n = product.n, depth = K_BYTES / element_bytes(product.type);
  static float a[M * K_BYTES], b[MAX_N * K_BYTES], d[M * MAX_N];
  if (product.a_in_registers) {
    load_fragments(product, a, depth);
  } else {
    const Operand operand(warpgroup, product, product.a, product.a_mn_major);
    for (int warp = 0; warp < 4; ++warp) operand.load(a, depth, 16, 16 * warp, product.warps[warp]);
  }
  Operand(warpgroup, product, product.b, product.b_mn_major).load(b, depth, n, 0, product.all);
  multiply(a, b, d, n, depth);
  for (int t = 0; t < WARPGROUP_SIZE; ++t) {
    float* const values = &product.accumulator->values[t * n / 2];
    for (int i = 0; i < n / 2; ++i) {
      const int row = t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + t % 4 * 2 + i % 2;
      values[i] = product.adds ? values[i] + d[row * n + column] : d[row * n + column];
    }
  }
  product.done = true;
  ++warpgroup.executed;
}

}  // namespace emu
