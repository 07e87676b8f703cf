// What the host drawer and the CUDA shim call. Each function is one instruction (or one intrinsic) of the kernel text;
// its meaning, its checks and its arithmetic live in the runtime, which is compiled without access hooks.
#pragma once
#include <stdint.h>

namespace emu {

struct Index3 {
  unsigned x, y, z;
};

// By value and `const`: no hook sees a load, and the compiler may keep the result (a fiber's frame is always its own).
Index3 thread_index() __attribute__((const));
Index3 block_index() __attribute__((const));
Index3 block_size() __attribute__((const));
Index3 grid_size() __attribute__((const));

// smem.cuh
unsigned char* dyn_smem();
uint32_t smem_addr(const void* pointer);

// warp.cuh
float shfl_xor(float x, int lane_mask);
uint32_t ballot(bool x);
bool sync_block(bool x);  // whether any thread of the block brought true

// mma_sync.cuh, ldmatrix.cuh, convert.cuh
enum class Type : int { BF16, FP16 };
void mma_m16n8k16(Type type, float* d, const uint32_t* a, uint32_t b0, uint32_t b1);
void ldmatrix_x4(uint32_t* r, const void* row, bool transposed);
uint32_t pack2(Type type, float lo, float hi);
float to_float(Type type, uint16_t bits);
float exp2_ftz(float x);
float log2_ftz(float x);

// cp_async.cuh
void cp_async(void* smem, const void* gmem, uint32_t bytes);
void cp_async_commit();
void cp_async_wait(int pending);

}  // namespace emu
