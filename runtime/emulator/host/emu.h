// What the host's PTX wrappers and the CUDA shim call. Each function is one instruction (or one intrinsic) of the kernel text;
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
int first_lane(int x);
void sync_warp();
bool sync_block(bool x);  // whether any thread of the block brought true

// mma_sync.cuh, ldmatrix.cuh, convert.cuh
enum class Type : int { BF16, FP16, E4M3, E5M2 };
void mma_m16n8k16(Type type, float* d, const uint32_t* a, uint32_t b0, uint32_t b1);
void ldmatrix_x4(uint32_t* r, const void* row, bool transposed);
uint32_t pack2(Type type, float lo, float hi);
float to_float(Type type, uint16_t bits);
uint32_t fma2(Type type, uint32_t a, uint32_t b, uint32_t c);
float exp2_ftz(float x);
float rcp_ftz(float x);
float log2_ftz(float x);

// cp_async.cuh
void cp_async(void* smem, const void* gmem, uint32_t bytes);
void cp_async_commit();
void cp_async_wait(int pending);


// stmatrix.cuh, elect.cuh
void stmatrix_x4(void* row, const uint32_t* r, bool transposed);
bool elect_one();

// named_barrier.cuh, setmaxnreg.cuh, fence.cuh, griddepcontrol.cuh
void named_barrier(int id, int expected, bool wait);
void setmaxnreg(int registers, bool raise);
void fence_proxy_async(bool global);
void fence_acq_rel();

// mbarrier.cuh
void mbarrier_init(uint64_t* barrier, uint32_t arrivals);
void fence_mbarrier_init();
void mbarrier_arrive(uint64_t* barrier, uint32_t bytes);
void mbarrier_arrive_cluster(uint64_t* barrier, uint32_t rank);
bool mbarrier_try_wait(uint64_t* barrier, uint32_t parity);
bool mbarrier_test_wait(uint64_t* barrier, uint32_t parity);
void mbarrier_wait(uint64_t* barrier, uint32_t parity);

// cluster.cuh
uint32_t cluster_rank();
uint32_t cluster_blocks();
void cluster_arrive(bool release);
void cluster_wait();
void* mapa(const void* pointer, uint32_t rank);

// bulk.cuh, tma.cuh. blocks: a multicast's mask, 0: this block alone
void bulk_load(void* smem, const void* gmem, uint32_t bytes, uint64_t* barrier);
void bulk_store(void* gmem, const void* smem, uint32_t bytes);
void bulk_reduce_add_f32(float* gmem, const float* smem, uint32_t bytes);
void bulk_commit();
void bulk_wait(int pending, bool reads_only);
void tma_load(void* smem, const void* map, uint64_t* barrier, int rank, const int* coords, uint32_t blocks);
void tma_store(const void* map, const void* smem, int rank, const int* coords, bool adds);
void prefetch_tensormap(const void* map);

// wgmma.cuh
void wgmma_ss(Type type, int n, float* d, uint64_t a, bool a_mn_major, uint64_t b, bool b_mn_major, int scale_d);
void wgmma_rs(Type type, int n, float* d, const uint32_t* a, uint64_t b, bool b_mn_major, int scale_d);
void wgmma_fence(const void* registers, unsigned long bytes);
void wgmma_commit();
void wgmma_wait(int pending);
void wgmma_finished(const void* registers, unsigned long bytes);

// atomic.cuh
int atom_add(int* address, int x, bool acquires, bool releases);
void red_add_f32(float* address, float x);
void red_add_f32x4(float* address, float x, float y, float z, float w);
void red_add2(Type type, void* address, uint32_t x);
int ld_acquire(const int* address);
void st_release(int* address, int value);
void wait_until_equal(const int* address, int value);

}  // namespace emu
