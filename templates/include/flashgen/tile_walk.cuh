// The tiles of keys that some row of a query tile sees, from the last to the first, found by the tiles' classes: a warp
// looks at 32 of them at once, so that those in between cost nothing but a bit. Where there are many, it first looks at
// 32 spans of tiles, and then only into those that are not masked as a whole.
#pragma once
#include "flashgen/ptx/warp.cuh"
#include "flashgen/span.cuh"

// A tile in one word, for shared memory: 8 * tile + these. Negative: none.
constexpr int TILE_LAST = 1;     // of this query tile
constexpr int TILE_PARTIAL = 2;  // some row does not see all of it: masked
constexpr int NEXT_UNSEEN = 4;   // the next tile: no row of this warpgroup sees any of it
FG_DEVICE int tile_of(int word) { return word >> 3; }

// Neighbouring tiles, from tile `first` downwards, that every row sees whole; or one that is PARTIAL. count 0: none.
struct TileRun {
  int first, count;
  bool partial;
  FG_DEVICE int word(int i = 0) const { return (first - i) << 3 | (partial ? TILE_PARTIAL : 0); }
};

struct TileWalk {
  int base;                // tiles below it are yet to be looked at
  uint32_t seen, partial;  // of tiles base .. base + 31, those that are due
  uint32_t spans;          // of 2^shift tiles, that are not masked
  int shift;

  // By a whole warp; `classify(first, last)` gives bits VISIBLE and MASKED of tiles first .. last.
  template <class Classify>
  FG_DEVICE TileWalk(int num_tiles, Classify classify) : base(num_tiles), seen(0), partial(0), spans(~0u), shift(0) {
    while (num_tiles > WARP_SIZE << shift) ++shift;
    if (shift < 2) return;  // two looks find all tiles, too
    const int first = (int)(threadIdx.x % WARP_SIZE) << shift;
    const int found = first < num_tiles ? classify(first, min_int(first + (1 << shift), num_tiles) - 1) : MASKED;
    spans = lanes_in_warp((found & VISIBLE) != 0);
  }

  // Spans that hold tiles yet to be looked at.
  FG_DEVICE uint32_t spans_below() const { return base > 0 ? spans & ((2u << ((base - 1) >> shift)) - 1) : 0; }

  // Whether no more runs follow; false also where that is not known yet.
  FG_DEVICE bool ends() const { return seen == 0 && spans_below() == 0; }

  // The next run, of MOST tiles at most. By a whole warp.
  template <int MOST, class Classify>
  FG_DEVICE TileRun next(Classify classify) {
    while (seen == 0) {
      const uint32_t below = spans_below();
      if (below == 0) return {0, 0, false};
      base = min_int(base, (highest_bit(below) + 1) << shift) - WARP_SIZE;
      const int tile = base + (int)(threadIdx.x % WARP_SIZE);
      const int found = tile >= 0 ? classify(tile, tile) : MASKED;
      seen = lanes_in_warp((found & VISIBLE) != 0);
      partial = lanes_in_warp((found & MASKED) != 0);
    }
    const int lane = highest_bit(seen);
    const bool is_partial = (partial >> lane & 1) != 0;
    const int whole = 31 - highest_bit(~(seen & ~partial) << (31 - lane));  // in a row, from this one on
    const int count = is_partial ? 1 : min_int(min_int(whole, lane + 1), MOST);
    seen &= (1u << (lane + 1 - count)) - 1;
    return {first_lane(base + lane), first_lane(count), first_lane(is_partial) != 0};  // as the compiler may know
  }
};
