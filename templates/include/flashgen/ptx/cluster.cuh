// Thread block clusters: ranks, the barrier of the cluster and the shared memory of its other blocks.
#pragma once
#include "flashgen/ptx/smem.cuh"

// %cluster_ctarank (PTX ISA 10): this block's number in its cluster.
FG_DEVICE uint32_t cluster_ctarank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// %cluster_nctarank (PTX ISA 10): blocks in the cluster.
FG_DEVICE uint32_t cluster_nctarank() {
  uint32_t blocks;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
  return blocks;
}

// barrier.cluster.arrive (PTX ISA 9.7.13.3): by all threads of the cluster, each warp together. Writes before it are
// visible after the wait.
FG_DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }

// As above, ordering no memory accesses.
FG_DEVICE void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }

// barrier.cluster.wait (PTX ISA 9.7.13.3): returns when all threads of the cluster have arrived.
FG_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

FG_DEVICE void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

// mapa (PTX ISA 9.7.9.23): where `pointer`, into this block's shared memory, lies in block `cta` of the cluster.
// Plain loads and stores go through the result.
template <class T>
FG_DEVICE T* mapa(T* pointer, uint32_t cta) {
  T* mapped;
  asm("mapa.u64 %0, %1, %2;" : "=l"(mapped) : "l"(pointer), "r"(cta));
  return mapped;
}

// mapa.shared::cluster: the same as a 32-bit address, for other PTX wrappers.
FG_DEVICE uint32_t smem_addr_in_cta(const void* pointer, uint32_t cta) {
  uint32_t mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(smem_addr(pointer)), "r"(cta));
  return mapped;
}
