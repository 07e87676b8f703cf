// bar (PTX ISA 9.7.13.1): the 16 named barriers of a block; 0 is the one sync_block() uses. THREADS counts all threads
// that take part, those that only arrive included: whole warps, the same number at every call until the barrier opens.
#pragma once
#include "flashgen/prelude.cuh"

constexpr int NAMED_BARRIERS = 16;

// bar.sync: waits until THREADS threads have come; their writes to memory are then visible.
template <int ID, int THREADS>
FG_DEVICE void bar_sync() {
  static_assert(ID >= 0 && ID < NAMED_BARRIERS && THREADS > 0 && THREADS % WARP_SIZE == 0, "a named barrier");
  asm volatile("bar.sync %0, %1;" ::"n"(ID), "n"(THREADS) : "memory");
}

// bar.arrive: is counted and goes on.
template <int ID, int THREADS>
FG_DEVICE void bar_arrive() {
  static_assert(ID >= 0 && ID < NAMED_BARRIERS && THREADS > 0 && THREADS % WARP_SIZE == 0, "a named barrier");
  asm volatile("bar.arrive %0, %1;" ::"n"(ID), "n"(THREADS) : "memory");
}

// With a number known only at run time, the same for the whole warp: the kernel then reserves all 16.
template <int THREADS>
FG_DEVICE void bar_sync_at(int id) {
  static_assert(THREADS > 0 && THREADS % WARP_SIZE == 0, "whole warps");
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

// With the number of threads known only then, too.
FG_DEVICE void bar_sync_of(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
FG_DEVICE void bar_arrive_of(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
