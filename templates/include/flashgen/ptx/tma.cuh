// cp.async.bulk.tensor (PTX ISA 9.7.9.25.5): boxes of a tensor of 1 to 5 dimensions, copied by TMA and
// issued by one thread. The TensorMap fixes box, swizzle and strides; coordinates count elements, the contiguous
// dimension first. The box of a load may lie outside, and gets zeros there. That of a store or sum may hang over the
// end, and is cut off; it must start in the tensor: a negative coordinate traps (seen on an H200).
// Commit and wait of stores and sums: bulk.cuh.
#pragma once
#include "flashgen/ptx/bulk.cuh"

// What cuTensorMapEncodeTiled makes. A __grid_constant__ parameter, so that it has an address.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

// prefetch.tensormap (PTX ISA 9.7.9.15): the first copy will not wait for the map itself.
FG_DEVICE void prefetch_tensormap(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// A box from global to shared. `barrier` gets the bytes of the whole box, also where it lies outside.
FG_DEVICE void tma_load_1d(void* smem, const TensorMap* map, uint64_t* barrier, int c0,
                           CachePolicy policy = EVICT_NORMAL) {
  asm volatile(
      "cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3}], [%2], %4;"
      ::"r"(smem_addr(smem)), "l"(map), "r"(smem_addr(barrier)), "r"(c0), "l"((uint64_t)policy) : "memory");
}

FG_DEVICE void tma_load_2d(void* smem, const TensorMap* map, uint64_t* barrier, int c0, int c1,
                           CachePolicy policy = EVICT_NORMAL) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4}], [%2], %5;"
      ::"r"(smem_addr(smem)), "l"(map), "r"(smem_addr(barrier)), "r"(c0), "r"(c1), "l"((uint64_t)policy) : "memory");
}

FG_DEVICE void tma_load_3d(void* smem, const TensorMap* map, uint64_t* barrier, int c0, int c1, int c2,
                           CachePolicy policy = EVICT_NORMAL) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5}], [%2], %6;"
      ::"r"(smem_addr(smem)), "l"(map), "r"(smem_addr(barrier)), "r"(c0), "r"(c1), "r"(c2),
      "l"((uint64_t)policy) : "memory");
}

FG_DEVICE void tma_load_4d(void* smem, const TensorMap* map, uint64_t* barrier, int c0, int c1, int c2, int c3,
                           CachePolicy policy = EVICT_NORMAL) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;"
      ::"r"(smem_addr(smem)), "l"(map), "r"(smem_addr(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3),
      "l"((uint64_t)policy) : "memory");
}

FG_DEVICE void tma_load_5d(void* smem, const TensorMap* map, uint64_t* barrier, int c0, int c1, int c2, int c3, int c4,
                           CachePolicy policy = EVICT_NORMAL) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;"
      ::"r"(smem_addr(smem)), "l"(map), "r"(smem_addr(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3),
      "r"(c4), "l"((uint64_t)policy) : "memory");
}

// The same box to every block of the cluster whose bit is set in `ctas`, at the same place, each with its own barrier.
FG_DEVICE void tma_load_1d_multicast(void* smem, const TensorMap* map, uint64_t* barrier, uint16_t ctas, int c0,
                                     CachePolicy policy = EVICT_NORMAL) {
  asm volatile(
      "cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
      ".L2::cache_hint [%0], [%1, {%4}], [%2], %3, %5;"
      ::"r"(smem_addr(smem)), "l"(map), "r"(smem_addr(barrier)), "h"(ctas), "r"(c0), "l"((uint64_t)policy) : "memory");
}

FG_DEVICE void tma_load_2d_multicast(void* smem, const TensorMap* map, uint64_t* barrier, uint16_t ctas, int c0, int c1,
                                     CachePolicy policy = EVICT_NORMAL) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
      ".L2::cache_hint [%0], [%1, {%4, %5}], [%2], %3, %6;"
      ::"r"(smem_addr(smem)), "l"(map), "r"(smem_addr(barrier)), "h"(ctas), "r"(c0), "r"(c1),
      "l"((uint64_t)policy) : "memory");
}

FG_DEVICE void tma_load_3d_multicast(void* smem, const TensorMap* map, uint64_t* barrier, uint16_t ctas, int c0, int c1,
                                     int c2, CachePolicy policy = EVICT_NORMAL) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
      ".L2::cache_hint [%0], [%1, {%4, %5, %6}], [%2], %3, %7;"
      ::"r"(smem_addr(smem)), "l"(map), "r"(smem_addr(barrier)), "h"(ctas), "r"(c0), "r"(c1), "r"(c2),
      "l"((uint64_t)policy) : "memory");
}

FG_DEVICE void tma_load_4d_multicast(void* smem, const TensorMap* map, uint64_t* barrier, uint16_t ctas, int c0, int c1,
                                     int c2, int c3, CachePolicy policy = EVICT_NORMAL) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
      ".L2::cache_hint [%0], [%1, {%4, %5, %6, %7}], [%2], %3, %8;"
      ::"r"(smem_addr(smem)), "l"(map), "r"(smem_addr(barrier)), "h"(ctas), "r"(c0), "r"(c1), "r"(c2),
      "r"(c3), "l"((uint64_t)policy) : "memory");
}

FG_DEVICE void tma_load_5d_multicast(void* smem, const TensorMap* map, uint64_t* barrier, uint16_t ctas, int c0, int c1,
                                     int c2, int c3, int c4, CachePolicy policy = EVICT_NORMAL) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
      ".L2::cache_hint [%0], [%1, {%4, %5, %6, %7, %8}], [%2], %3, %9;"
      ::"r"(smem_addr(smem)), "l"(map), "r"(smem_addr(barrier)), "h"(ctas), "r"(c0), "r"(c1), "r"(c2),
      "r"(c3), "r"(c4), "l"((uint64_t)policy) : "memory");
}

// A box from shared to global. Writers of the shared memory fence first (fence_proxy_async_shared).
FG_DEVICE void tma_store_1d(const TensorMap* map, const void* smem, int c0) {
  asm volatile(
      "cp.async.bulk.tensor.1d.global.shared::cta.tile.bulk_group [%0, {%2}], [%1];"
      ::"l"(map), "r"(smem_addr(smem)), "r"(c0) : "memory");
}

FG_DEVICE void tma_store_2d(const TensorMap* map, const void* smem, int c0, int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];"
      ::"l"(map), "r"(smem_addr(smem)), "r"(c0), "r"(c1) : "memory");
}

FG_DEVICE void tma_store_3d(const TensorMap* map, const void* smem, int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];"
      ::"l"(map), "r"(smem_addr(smem)), "r"(c0), "r"(c1), "r"(c2) : "memory");
}

FG_DEVICE void tma_store_4d(const TensorMap* map, const void* smem, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
      ::"l"(map), "r"(smem_addr(smem)), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}

FG_DEVICE void tma_store_5d(const TensorMap* map, const void* smem, int c0, int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];"
      ::"l"(map), "r"(smem_addr(smem)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4) : "memory");
}

// cp.reduce.async.bulk.tensor: adds the box to what is there, each element atomic, in the type of the map.
FG_DEVICE void tma_reduce_add_1d(const TensorMap* map, const void* smem, int c0) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.1d.global.shared::cta.add.tile.bulk_group [%0, {%2}], [%1];"
      ::"l"(map), "r"(smem_addr(smem)), "r"(c0) : "memory");
}

FG_DEVICE void tma_reduce_add_2d(const TensorMap* map, const void* smem, int c0, int c1) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3}], [%1];"
      ::"l"(map), "r"(smem_addr(smem)), "r"(c0), "r"(c1) : "memory");
}

FG_DEVICE void tma_reduce_add_3d(const TensorMap* map, const void* smem, int c0, int c1, int c2) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4}], [%1];"
      ::"l"(map), "r"(smem_addr(smem)), "r"(c0), "r"(c1), "r"(c2) : "memory");
}

FG_DEVICE void tma_reduce_add_4d(const TensorMap* map, const void* smem, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
      ::"l"(map), "r"(smem_addr(smem)), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}

FG_DEVICE void tma_reduce_add_5d(const TensorMap* map, const void* smem, int c0, int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.5d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];"
      ::"l"(map), "r"(smem_addr(smem)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4) : "memory");
}
