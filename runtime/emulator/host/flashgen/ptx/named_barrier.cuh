// Host twin of ptx/named_barrier.cuh.
#pragma once
#include "flashgen/prelude.cuh"

constexpr int NAMED_BARRIERS = 16;

template <int ID, int THREADS>
FG_DEVICE void bar_sync() {
  static_assert(ID >= 0 && ID < NAMED_BARRIERS && THREADS > 0 && THREADS % WARP_SIZE == 0, "a named barrier");
  emu::named_barrier(ID, THREADS, true);
}

template <int ID, int THREADS>
FG_DEVICE void bar_arrive() {
  static_assert(ID >= 0 && ID < NAMED_BARRIERS && THREADS > 0 && THREADS % WARP_SIZE == 0, "a named barrier");
  emu::named_barrier(ID, THREADS, false);
}

template <int THREADS>
FG_DEVICE void bar_sync_at(int id) {
  static_assert(THREADS > 0 && THREADS % WARP_SIZE == 0, "whole warps");
  emu::named_barrier(id, THREADS, true);
}

FG_DEVICE void bar_sync_of(int id, int threads) { emu::named_barrier(id, threads, true); }
FG_DEVICE void bar_arrive_of(int id, int threads) { emu::named_barrier(id, threads, false); }
