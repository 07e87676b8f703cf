// Host twin of ptx/bulk.cuh.
#pragma once
#include "flashgen/cache_policy.cuh"
#include "flashgen/ptx/smem.cuh"

FG_DEVICE void bulk_load(void* smem, const void* gmem, uint32_t bytes, uint64_t* barrier,
                         CachePolicy policy = EVICT_NORMAL) {
  emu::bulk_load(smem, gmem, bytes, barrier);
}
FG_DEVICE void bulk_store(void* gmem, const void* smem, uint32_t bytes) { emu::bulk_store(gmem, smem, bytes); }
FG_DEVICE void bulk_reduce_add_f32(float* gmem, const float* smem, uint32_t bytes) {
  emu::bulk_reduce_add_f32(gmem, smem, bytes);
}
FG_DEVICE void bulk_commit() { emu::bulk_commit(); }

template <int PENDING>
FG_DEVICE void bulk_wait() {
  emu::bulk_wait(PENDING, false);
}

template <int PENDING>
FG_DEVICE void bulk_wait_read() {
  emu::bulk_wait(PENDING, true);
}
