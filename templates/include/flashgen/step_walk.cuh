// The steps of a block that has a tile of keys, where tiles of queries are found by their class (tile_walk.cuh): one warp
// finds them, and all others read what is due from shared memory. Barriers of the block lie between.
#pragma once
#include "flashgen/tile_walk.cuh"

struct BackwardStep {
  int head, m_tile;  // of queries; `head` at the end: none
  bool partial;      // some query does not see all keys
};

// In shared memory.
struct StepsAhead {
  BackwardStep due[2];  // this step and the next, by turns
  int head;             // whose tiles are being found
  TileWalk walk;        // as far as it has come
};

// By a whole warp. `classify(head, first, last)` gives bits VISIBLE and MASKED of query tiles first .. last of a head.
template <class Classify>
FG_DEVICE BackwardStep next_step(TileWalk& walk, int& head, int head_end, int num_tiles, Classify classify) {
  const auto of_head = [&](int first, int last) { return classify(head, first, last); };
  for (;;) {
    const TileRun run = walk.next<1>(of_head);
    if (run.count != 0) return {head, run.first, run.partial};
    if (head + 1 >= head_end) return {head_end, 0, false};
    ++head;
    walk = TileWalk(num_tiles, of_head);
  }
}

template <class Classify>
FG_DEVICE void find_first_steps(StepsAhead& steps, int head, int head_end, int num_tiles, Classify classify) {
  TileWalk walk(num_tiles, [&](int first, int last) { return classify(head, first, last); });
  const BackwardStep first = next_step(walk, head, head_end, num_tiles, classify);
  const BackwardStep second = next_step(walk, head, head_end, num_tiles, classify);
  if (threadIdx.x % WARP_SIZE == 0) steps = {{first, second}, head, walk};
}

// Puts the step after the next in the place of the one that is done, of this `turn`.
template <class Classify>
FG_DEVICE void find_step(StepsAhead& steps, int turn, int head_end, int num_tiles, Classify classify) {
  TileWalk walk = steps.walk;
  int head = steps.head;
  const BackwardStep found = next_step(walk, head, head_end, num_tiles, classify);
  sync_warp();  // all lanes have read
  if (threadIdx.x % WARP_SIZE == 0) {
    steps.due[turn] = found;
    steps.head = head;
    steps.walk = walk;
  }
}
