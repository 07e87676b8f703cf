// The tiles of keys that some row of a query tile sees, from the last to the first, found by the tiles' classes: a warp
// looks at 32 of them at once, so that those in between cost nothing but a bit.
#pragma once
#include "flashgen/ptx/warp.cuh"
#include "flashgen/span.cuh"

// A tile in one word, for shared memory: 4 * tile + LAST + PARTIAL. Negative: none.
constexpr int TILE_PARTIAL = 1;  // some row does not see all of it: masked
constexpr int TILE_LAST = 2;     // of this query tile
FG_DEVICE int tile_of(int entry) { return entry >> 2; }

struct TileWalk {
  int base;                 // tiles below it are yet to be looked at
  uint32_t seen, partial;   // of tiles base .. base + 31, those that are due

  FG_DEVICE explicit TileWalk(int num_tiles) : base(num_tiles), seen(0), partial(0) {}

  // The next tile as a word without LAST, or -1. By a whole warp; `classify(tile)` gives bits SEEN and HIDDEN.
  template <class Classify>
  FG_DEVICE int next(Classify classify) {
    while (seen == 0) {
      if (base <= 0) return -1;
      base -= WARP_SIZE;
      const int tile = base + (int)(threadIdx.x % WARP_SIZE);
      const int found = tile >= 0 ? classify(tile) : HIDDEN;
      seen = lanes_in_warp((found & SEEN) != 0);
      partial = lanes_in_warp((found & HIDDEN) != 0);
    }
    const int lane = highest_bit(seen);
    seen ^= 1u << lane;
    return (base + lane) << 2 | (partial >> lane & TILE_PARTIAL);
  }
};
