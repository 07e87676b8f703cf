// The tiles of keys that some row of a query tile sees, from the last to the first, found by the tiles' classes: a warp
// looks at 32 of them at once, so that those in between cost nothing but a bit. Where there are many, it first looks at
// 32 runs of tiles, and then only into those runs that are not hidden as a whole.
#pragma once
#include "flashgen/ptx/warp.cuh"
#include "flashgen/span.cuh"

// A tile in one word, for shared memory: 8 * tile + these. Negative: none.
constexpr int TILE_LAST = 1;     // of this query tile
constexpr int TILE_PARTIAL = 2;  // some row does not see all of it: masked
constexpr int TILE_UNSEEN = 4;   // no row of this warpgroup sees any of it
FG_DEVICE int tile_of(int word) { return word >> 3; }

struct TileWalk {
  int base;                // tiles below it are yet to be looked at
  uint32_t seen, partial;  // of tiles base .. base + 31, those that are due
  uint32_t runs;           // of 2^shift tiles, that are not hidden
  int shift;

  // By a whole warp; `classify(first, last)` gives bits SEEN and HIDDEN of tiles first .. last.
  template <class Classify>
  FG_DEVICE TileWalk(int num_tiles, Classify classify) : base(num_tiles), seen(0), partial(0), runs(~0u), shift(0) {
    while (num_tiles > WARP_SIZE << shift) ++shift;
    if (shift < 2) return;  // two looks find all tiles, too
    const int first = (int)(threadIdx.x % WARP_SIZE) << shift;
    const int found = first < num_tiles ? classify(first, min_int(first + (1 << shift), num_tiles) - 1) : HIDDEN;
    runs = lanes_in_warp((found & SEEN) != 0);
  }

  // Runs that hold tiles yet to be looked at.
  FG_DEVICE uint32_t runs_below() const { return base > 0 ? runs & ((2u << ((base - 1) >> shift)) - 1) : 0; }

  // Whether at most `count` tiles are due; false where that is not known yet.
  FG_DEVICE bool ends_within(int count) const { return runs_below() == 0 && count_bits(seen) <= count; }

  // The next tile as a word without LAST, or -1. By a whole warp.
  template <class Classify>
  FG_DEVICE int next(Classify classify) {
    while (seen == 0) {
      const uint32_t below = runs_below();
      if (below == 0) return -1;
      base = min_int(base, (highest_bit(below) + 1) << shift) - WARP_SIZE;
      const int tile = base + (int)(threadIdx.x % WARP_SIZE);
      const int found = tile >= 0 ? classify(tile, tile) : HIDDEN;
      seen = lanes_in_warp((found & SEEN) != 0);
      partial = lanes_in_warp((found & HIDDEN) != 0);
    }
    const int lane = highest_bit(seen);
    seen ^= 1u << lane;
    return (base + lane) << 3 | ((partial >> lane & 1) != 0 ? TILE_PARTIAL : 0);
  }
};
