#include "machine.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>

#include "fault.h"
#include "memory.h"

namespace emu {

Machine machine;
Fiber* current = nullptr;
bool on_scheduler_stack = true;

namespace {

constexpr double SWITCH_WARP = 0.125;  // after all lanes of a warp have had their turn
constexpr double YIELD = 0.05;         // in a drawer call, under the random policy
constexpr double STEP_ASYNC = 0.1;     // between two turns of warps, under the random policy
constexpr auto BEAT = std::chrono::milliseconds(200);

std::vector<unsigned char*> stacks;

void check_at_exit(Fiber& fiber) { check_copies_at_exit(fiber); }

}  // namespace

// ---- threads

Actor Fiber::actor() const { return {{cta->linear, clock.seen[agent], pc, agent}, &clock}; }

void return_to_scheduler(Fiber& fiber) { switch_context(fiber.context, machine.scheduler); }

void Fiber::block(Wait reason, int detail) {
  wait = reason;
  wait_for = detail;
  --warp->ready;
  return_to_scheduler(*this);
}

void Fiber::wake() {
  wait = Wait::NOTHING;
  ++warp->ready;
}

Fiber& enter(const void* return_address) {
  current->pc = code_offset(return_address);
  return *current;
}

void maybe_yield(Fiber& fiber) {
  if (machine.policy == Policy::RANDOM && machine.chance(YIELD)) return_to_scheduler(fiber);
}

static void thread_main() {
  machine.launch->entry(machine.launch->params);
  Fiber& fiber = *current;
  check_at_exit(fiber);
  --fiber.cta->running;
  fiber.block(Wait::EXITED);
}

// ---- scheduler

uint64_t Machine::random() {
  random_state_ ^= random_state_ << 13;
  random_state_ ^= random_state_ >> 7;
  random_state_ ^= random_state_ << 17;
  return random_state_ * 0x2545f4914f6cdd1dULL >> 16;
}

bool Machine::chance(double probability) { return (random() & 0xffffff) < probability * 0x1000000; }

void Machine::start_block(int slot) {
  auto& cta = resident[slot];
  if (cta == nullptr) cta = std::make_unique<Cta>();
  const uint32_t linear = order_[next_block_++];
  const uint32_t *grid = launch->grid, *block = launch->block;
  cta->linear = linear;
  cta->index = {linear % grid[0], linear / grid[0] % grid[1], linear / grid[0] / grid[1]};
  cta->slot = slot;
  cta->running = threads;
  cta->smem = shared_memory(slot);
  memset(cta->smem, 0xff, launch->smem_bytes);  // NaN in every element type
  cta->shadow.reset(launch->smem_bytes, State::UNINITIALISED);
  for (Barrier& barrier : cta->barriers) {
    barrier = {};
    barrier.joined.reset(threads);
  }
  cta->warps.assign(threads / WARP_SIZE, {});
  cta->fibers.resize(threads);
  while (stacks.size() < resident.size() * threads) stacks.push_back(new_stack());
  for (int t = 0; t < threads; ++t) {
    Fiber& fiber = cta->fibers[t];
    Warp& warp = cta->warps[t / WARP_SIZE];
    fiber.stack = stacks[slot * threads + t];
    fiber.cta = cta.get();
    fiber.warp = &warp;
    fiber.thread = t;
    fiber.lane = t % WARP_SIZE;
    fiber.agent = static_cast<uint16_t>(t);
    const auto u = static_cast<unsigned>(t);
    fiber.index = {u % block[0], u / block[0] % block[1], u / block[0] / block[1]};
    fiber.wait = Wait::NOTHING;
    fiber.clock.reset(threads);
    fiber.clock.seen[t] = 1;
    fiber.copies.assign(1, {});
    prepare(fiber.context, fiber.stack, thread_main);
    warp.cta = cta.get();
    warp.lanes[t % WARP_SIZE] = &fiber;
    ++warp.ready;
  }
}

void Machine::exit_block(Cta& cta) {
  for (Warp& warp : cta.warps) warp.accesses.flush(banks);
  for (int i = 0; i < MAX_BARRIERS; ++i) {
    if (cta.barriers[i].arrived == 0) continue;
    Fault fault{"barrier", "", &cta.fibers[0], 0, {}, nullptr, {}};
    fault.text = "the block ends with " + std::to_string(cta.barriers[i].arrived) + " of " +
                 std::to_string(cta.barriers[i].expected) + " threads at barrier " + std::to_string(i);
    stop(fault);
  }
}

void Machine::resume(Fiber& fiber) {
  ++switches;
  current = &fiber;
  on_scheduler_stack = false;
  switch_context(scheduler, fiber.context);
  on_scheduler_stack = true;
  current = nullptr;
  if (!report.empty()) throw Stop{};
}

void Machine::run_warp(Warp& warp) {
  do {
    const int first = policy == Policy::EAGER ? 0 : static_cast<int>(random() % WARP_SIZE);
    for (int i = 0; i < WARP_SIZE && warp.ready > 0; ++i) {
      Fiber& fiber = *warp.lanes[(first + i) % WARP_SIZE];
      if (fiber.wait == Wait::NOTHING) resume(fiber);
    }
  } while (warp.ready > 0 && !chance(SWITCH_WARP));
}

bool Machine::step_async() { return finish_copies(*this); }

void Machine::run() {
  random_state_ = (launch->seed + 1) * 0x9e3779b97f4a7c15ULL | 1;
  policy = static_cast<Policy>(launch->policy);
  threads = static_cast<int>(launch->block[0] * launch->block[1] * launch->block[2]);
  switches = accesses = next_block_ = 0;
  in_flight.clear();
  banks.clear();
  order_.resize(launch->grid[0] * launch->grid[1] * launch->grid[2]);
  for (uint32_t i = 0; i < order_.size(); ++i) order_[i] = i;
  if (policy == Policy::LAZY) std::reverse(order_.begin(), order_.end());
  if (policy == Policy::RANDOM) {
    for (size_t i = order_.size(); i > 1; --i) std::swap(order_[i - 1], order_[random() % i]);
  }
  for (const auto& cta : resident) {
    if (cta != nullptr) cta->shadow.reset(0, State::UNINITIALISED);
  }
  resident.clear();
  resident.resize(std::min<size_t>(std::max(launch->resident, 1u), order_.size()));
  uint32_t done = 0;
  for (size_t slot = 0; slot < resident.size(); ++slot) start_block(static_cast<int>(slot));
  std::vector<Warp*> warps;
  auto last_beat = std::chrono::steady_clock::now();
  while (true) {
    warps.clear();
    for (const auto& cta : resident) {
      if (cta->running == 0) continue;
      for (Warp& warp : cta->warps) {
        if (warp.ready > 0) warps.push_back(&warp);
      }
    }
    if (warps.empty()) {
      if (!step_async()) deadlock();
      continue;
    }
    if (policy == Policy::RANDOM && chance(STEP_ASYNC)) step_async();
    Warp& warp = *warps[random() % warps.size()];
    run_warp(warp);
    Cta& cta = *warp.cta;
    if (cta.running == 0) {
      exit_block(cta);
      if (++done == order_.size()) return;
      if (next_block_ < order_.size()) start_block(cta.slot);
    }
    if (std::chrono::steady_clock::now() - last_beat > BEAT) {
      last_beat = std::chrono::steady_clock::now();
      launch->beat(done);
    }
  }
}

void Machine::deadlock() {
  std::map<std::pair<uint32_t, std::string>, Waiters> groups;
  for (const auto& cta : resident) {
    for (const Fiber& fiber : cta->fibers) {
      std::string what;
      switch (fiber.wait) {
        case Wait::COLLECTIVE:
          what = "the other lanes of its warp (" + std::to_string(fiber.warp->arrived) + " of 32 arrived)";
          break;
        case Wait::BARRIER: {
          const Barrier& barrier = cta->barriers[fiber.wait_for];
          what = "barrier " + std::to_string(fiber.wait_for) + " (" + std::to_string(barrier.arrived) + " of " +
                 std::to_string(barrier.expected) + " arrived)";
          break;
        }
        case Wait::EXITED:
          what = "nothing: exited";
          break;
        default:
          what = "its copies";
      }
      if (cta->running == 0) continue;
      auto [entry, fresh] = groups.try_emplace({cta->linear, what}, Waiters{0, cta->linear, fiber.thread, fiber.pc, what});
      ++entry->second.count;
    }
  }
  Fault fault{"deadlock", "no thread can go on", nullptr, 0, {}, nullptr, {}};
  for (const auto& [key, waiters] : groups) fault.waiters.push_back(waiters);
  stop(fault);
}

// ---- warp collectives

void meet(Fiber& fiber, Collective collective, void* arguments) {
  Warp& warp = *fiber.warp;
  if (warp.arrived == 0) {
    warp.collective = collective;
  } else if (warp.collective != collective) {
    fail(fiber, "collective", {}, "lanes of one warp meet in different collectives");
  }
  warp.arguments[fiber.lane] = arguments;
  if (++warp.arrived < WARP_SIZE) {
    fiber.block(Wait::COLLECTIVE);
    return;
  }
  warp.arrived = 0;
  warp.accesses.flush(machine.banks);
  collective(warp);
  for (Fiber* lane : warp.lanes) {
    if (lane != &fiber) lane->wake();
  }
}

}  // namespace emu
