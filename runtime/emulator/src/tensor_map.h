// What stands in the 128 bytes of a TensorMap on the host. Written by runtime/emulator/worker.py.
#pragma once
#include <cstdint>

namespace emu {

constexpr uint32_t TENSOR_MAP_MAGIC = 0x70616d74;
constexpr int MAX_RANK = 5;

struct EncodedMap {
  uint32_t magic;
  uint32_t rank;
  uint32_t element_bytes;
  uint32_t is_f32;
  uint32_t swizzle_bytes;  // 0: none
  uint32_t box[MAX_RANK];
  uint64_t data;
  uint64_t dims[MAX_RANK];
  uint64_t strides[MAX_RANK - 1];  // bytes, of all dimensions but the first
};
static_assert(sizeof(EncodedMap) <= 128, "a TensorMap");

}  // namespace emu
