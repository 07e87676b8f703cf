// The state of a pipeline: index and phase of a stage in a ring that producers fill and consumers empty. Each stage has a
// full and an empty mbarrier.
#pragma once
#include "flashgen/ptx/mbarrier.cuh"
#include "flashgen/ptx/tma.cuh"
#include "flashgen/ptx/warp.cuh"

template <int STAGES>
struct Ring {
  int stage = 0;
  uint32_t phase = 0;  // of the pass through the ring: `full` of the first pass ends phase 0

  FG_DEVICE void advance() {
    stage = stage + 1 == STAGES ? 0 : stage + 1;
    phase ^= stage == 0;
  }
  FG_DEVICE Ring before() const { return {stage == 0 ? STAGES - 1 : stage - 1, stage == 0 ? phase ^ 1 : phase}; }
  FG_DEVICE void wait_full(uint64_t* full) const { mbarrier_wait_parity(full + stage, phase); }
  // The phase before the first of a fresh barrier has ended, so the first pass does not wait.
  FG_DEVICE void wait_empty(uint64_t* empty) const { mbarrier_wait_parity(empty + stage, phase ^ 1); }
};

// A struct of 32-bit words from shared memory, known to be the same in the whole warp.
template <class T>
FG_DEVICE T uniform_copy(const T& shared) {
  T copy;
#pragma unroll
  for (int i = 0; i < (int)(sizeof(T) / 4); ++i)
    reinterpret_cast<int*>(&copy)[i] = first_lane(reinterpret_cast<const int*>(&shared)[i]);
  return copy;
}

// Starts a tile (a TileShape) of rows of one head, panel by panel; `full` expects the bytes of all panels, and is
// complete when they have landed. By one thread.
template <class Tile>
FG_DEVICE void load_panels(unsigned char* tile, const TensorMap* map, uint64_t* full, int row, int head, int batch,
                           CachePolicy policy) {
  mbarrier_arrive_expect_tx(full, Tile::BYTES);
#pragma unroll
  for (int chunk = 0; chunk < Tile::CHUNKS; chunk += Tile::PANEL_CHUNKS)
    tma_load_4d(tile + Tile::step(0, chunk), map, full, chunk * ELEMENTS_PER_CHUNK, row, head, batch, policy);
}
