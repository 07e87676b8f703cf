// Host twin of ptx/tma.cuh.
#pragma once
#include "flashgen/ptx/bulk.cuh"

struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

FG_DEVICE void prefetch_tensormap(const TensorMap* map) { emu::prefetch_tensormap(map); }

FG_DEVICE void tma_load_1d(void* smem, const TensorMap* map, uint64_t* barrier, int c0,
                           CachePolicy policy = EVICT_NORMAL) {
  const int coords[] = {c0};
  emu::tma_load(smem, map, barrier, 1, coords, 0);
}

FG_DEVICE void tma_load_2d(void* smem, const TensorMap* map, uint64_t* barrier, int c0, int c1,
                           CachePolicy policy = EVICT_NORMAL) {
  const int coords[] = {c0, c1};
  emu::tma_load(smem, map, barrier, 2, coords, 0);
}

FG_DEVICE void tma_load_3d(void* smem, const TensorMap* map, uint64_t* barrier, int c0, int c1, int c2,
                           CachePolicy policy = EVICT_NORMAL) {
  const int coords[] = {c0, c1, c2};
  emu::tma_load(smem, map, barrier, 3, coords, 0);
}

FG_DEVICE void tma_load_4d(void* smem, const TensorMap* map, uint64_t* barrier, int c0, int c1, int c2, int c3,
                           CachePolicy policy = EVICT_NORMAL) {
  const int coords[] = {c0, c1, c2, c3};
  emu::tma_load(smem, map, barrier, 4, coords, 0);
}

FG_DEVICE void tma_load_5d(void* smem, const TensorMap* map, uint64_t* barrier, int c0, int c1, int c2, int c3,
                           int c4, CachePolicy policy = EVICT_NORMAL) {
  const int coords[] = {c0, c1, c2, c3, c4};
  emu::tma_load(smem, map, barrier, 5, coords, 0);
}

FG_DEVICE void tma_load_1d_multicast(void* smem, const TensorMap* map, uint64_t* barrier, uint16_t ctas, int c0,
                                     CachePolicy policy = EVICT_NORMAL) {
  const int coords[] = {c0};
  emu::tma_load(smem, map, barrier, 1, coords, ctas);
}

FG_DEVICE void tma_load_2d_multicast(void* smem, const TensorMap* map, uint64_t* barrier, uint16_t ctas, int c0,
                                     int c1, CachePolicy policy = EVICT_NORMAL) {
  const int coords[] = {c0, c1};
  emu::tma_load(smem, map, barrier, 2, coords, ctas);
}

FG_DEVICE void tma_load_3d_multicast(void* smem, const TensorMap* map, uint64_t* barrier, uint16_t ctas, int c0,
                                     int c1, int c2, CachePolicy policy = EVICT_NORMAL) {
  const int coords[] = {c0, c1, c2};
  emu::tma_load(smem, map, barrier, 3, coords, ctas);
}

FG_DEVICE void tma_load_4d_multicast(void* smem, const TensorMap* map, uint64_t* barrier, uint16_t ctas, int c0,
                                     int c1, int c2, int c3, CachePolicy policy = EVICT_NORMAL) {
  const int coords[] = {c0, c1, c2, c3};
  emu::tma_load(smem, map, barrier, 4, coords, ctas);
}

FG_DEVICE void tma_load_5d_multicast(void* smem, const TensorMap* map, uint64_t* barrier, uint16_t ctas, int c0,
                                     int c1, int c2, int c3, int c4, CachePolicy policy = EVICT_NORMAL) {
  const int coords[] = {c0, c1, c2, c3, c4};
  emu::tma_load(smem, map, barrier, 5, coords, ctas);
}

FG_DEVICE void tma_store_1d(const TensorMap* map, const void* smem, int c0) {
  const int coords[] = {c0};
  emu::tma_store(map, smem, 1, coords, false);
}

FG_DEVICE void tma_store_2d(const TensorMap* map, const void* smem, int c0, int c1) {
  const int coords[] = {c0, c1};
  emu::tma_store(map, smem, 2, coords, false);
}

FG_DEVICE void tma_store_3d(const TensorMap* map, const void* smem, int c0, int c1, int c2) {
  const int coords[] = {c0, c1, c2};
  emu::tma_store(map, smem, 3, coords, false);
}

FG_DEVICE void tma_store_4d(const TensorMap* map, const void* smem, int c0, int c1, int c2, int c3) {
  const int coords[] = {c0, c1, c2, c3};
  emu::tma_store(map, smem, 4, coords, false);
}

FG_DEVICE void tma_store_5d(const TensorMap* map, const void* smem, int c0, int c1, int c2, int c3, int c4) {
  const int coords[] = {c0, c1, c2, c3, c4};
  emu::tma_store(map, smem, 5, coords, false);
}

FG_DEVICE void tma_reduce_add_1d(const TensorMap* map, const void* smem, int c0) {
  const int coords[] = {c0};
  emu::tma_store(map, smem, 1, coords, true);
}

FG_DEVICE void tma_reduce_add_2d(const TensorMap* map, const void* smem, int c0, int c1) {
  const int coords[] = {c0, c1};
  emu::tma_store(map, smem, 2, coords, true);
}

FG_DEVICE void tma_reduce_add_3d(const TensorMap* map, const void* smem, int c0, int c1, int c2) {
  const int coords[] = {c0, c1, c2};
  emu::tma_store(map, smem, 3, coords, true);
}

FG_DEVICE void tma_reduce_add_4d(const TensorMap* map, const void* smem, int c0, int c1, int c2, int c3) {
  const int coords[] = {c0, c1, c2, c3};
  emu::tma_store(map, smem, 4, coords, true);
}

FG_DEVICE void tma_reduce_add_5d(const TensorMap* map, const void* smem, int c0, int c1, int c2, int c3, int c4) {
  const int coords[] = {c0, c1, c2, c3, c4};
  emu::tma_store(map, smem, 5, coords, true);
}
