// Host twin of ptx/cluster.cuh.
#pragma once
#include "flashgen/ptx/smem.cuh"

FG_DEVICE uint32_t cluster_ctarank() { return emu::cluster_rank(); }
FG_DEVICE uint32_t cluster_nctarank() { return emu::cluster_blocks(); }
FG_DEVICE void cluster_arrive() { emu::cluster_arrive(true); }
FG_DEVICE void cluster_arrive_relaxed() { emu::cluster_arrive(false); }
FG_DEVICE void cluster_wait() { emu::cluster_wait(); }

FG_DEVICE void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

template <class T>
FG_DEVICE T* mapa(T* pointer, uint32_t cta) {
  return static_cast<T*>(emu::mapa(pointer, cta));
}

// The block's number where the hardware has it too: above the 24 bits of the offset.
FG_DEVICE uint32_t smem_addr_in_cta(const void* pointer, uint32_t cta) { return smem_addr(pointer) | cta << 24; }
