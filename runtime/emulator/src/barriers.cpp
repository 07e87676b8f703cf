// barrier.sync and __syncthreads (PTX ISA 9.7.13.1).
#include <algorithm>

#include "fault.h"
#include "machine.h"

namespace emu {

namespace {

void complete(Barrier& barrier) {
  double last = 0;
  for (const Fiber* fiber : barrier.waiting) last = std::max(last, fiber->warp->time + fiber->warp->thought);
  for (const Fiber* fiber : barrier.waiting) {
    if (Trace* const trace = traced(*fiber)) trace->wait_until(*fiber->warp, fiber->pc, last);
  }
  for (Fiber* fiber : barrier.waiting) {
    fiber->clock.join(barrier.joined);
    fiber->vote = barrier.vote;
    fiber->wake();
  }
  barrier.waiting.clear();
  barrier.arrived = 0;
  ++barrier.phase;
  barrier.vote = false;
  barrier.joined.reset(barrier.joined.seen.size());
}

// One thread arrives, and waits or goes on. Returns, after a wait, whether any of the threads brought `vote`.
bool arrive(Fiber& fiber, int id, int expected, bool vote, bool wait) {
  maybe_yield(fiber);
  if (id < 0 || id >= MAX_BARRIERS) fail(fiber, "argument", {}, "barrier %d", id);
  Barrier& barrier = fiber.cta->barriers[id];
  if (barrier.arrived > 0 && barrier.expected != expected) {
    fail(fiber, "barrier", {}, "barrier %d: %d threads expected, but %d by those that arrived earlier", id, expected,
         barrier.expected);
  }
  if (fiber.arrived_in[id] == barrier.phase) {
    fail(fiber, "barrier", {}, "barrier %d: the thread arrives a second time before the barrier has opened", id);
  }
  fiber.arrived_in[id] = barrier.phase;
  barrier.expected = expected;
  barrier.vote |= vote;
  barrier.joined.join(fiber.clock);
  fiber.release();
  ++barrier.arrived;
  const bool last = barrier.arrived == expected;
  if (!wait) {
    if (last) complete(barrier);
    return false;
  }
  barrier.waiting.push_back(&fiber);
  fiber.wait = Wait::BARRIER;
  fiber.wait_for = id;
  --fiber.warp->ready;
  if (last) {
    complete(barrier);  // wakes this fiber too
  } else {
    return_to_scheduler(fiber);
  }
  return fiber.vote;
}

}  // namespace

bool sync_block(bool vote) {
  Fiber& fiber = enter(__builtin_return_address(0));
  return arrive(fiber, 0, machine.threads, vote, true);
}

void named_barrier(int id, int expected, bool wait) {
  arrive(enter(__builtin_return_address(0)), id, expected, false, wait);
}

}  // namespace emu
