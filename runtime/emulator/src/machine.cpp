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
constexpr double YIELD = 0.05;         // in a PTX wrapper, under the random policy
constexpr double STEP_ASYNC = 0.1;     // between two turns of warps, under the random policy
constexpr size_t MAX_RESIDENT = 64;
constexpr size_t START_WINDOW = 32;    // clusters whose order of starts the policy chooses
constexpr int MAX_IDLE_POLLS = 10000;
constexpr auto BEAT = std::chrono::milliseconds(200);

std::vector<unsigned char*> stacks;

void check_at_exit(Fiber& fiber) {
  check_copies_at_exit(fiber);
  check_bulk_at_exit(fiber);
  check_products_at_exit(fiber);
}

}  // namespace

// ---- threads

Actor Fiber::actor() const { return {{cta->cluster->group, clock.seen[agent], pc, agent, false}, &clock}; }

uint16_t Cta::agent(int local) const {
  return static_cast<uint16_t>(static_cast<int>(rank) * machine.agents_per_block() + local);
}

// With more engines in use than there are agents, some share one: their copies then count as ordered.
uint16_t Cta::new_engine() {
  return agent(machine.threads + machine.threads / WARPGROUP_SIZE + next_engine++ % ENGINES);
}

Clock Cta::tick(uint16_t which) { return ++engine_clocks[which - agent(machine.threads)]; }

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
  fiber.cta->exited.join(fiber.clock);
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

void Machine::start_cluster(int slot) {
  auto cluster = std::make_shared<Cluster>();
  cluster->group = order_[next_cluster_++];
  cluster->joined.reset(launch->cluster * agents_per_block());
  cluster->ended = cluster->joined;
  for (uint32_t rank = 0; rank < launch->cluster; ++rank) {
    start_block(slot + static_cast<int>(rank), cluster->group * launch->cluster + rank, cluster);
  }
}

void Machine::start_block(int slot, uint32_t linear, const std::shared_ptr<Cluster>& cluster) {
  auto& cta = resident[slot];
  if (cta == nullptr) cta = std::make_unique<Cta>();
  const uint32_t* grid = launch->grid;
  const size_t agents = launch->cluster * agents_per_block();
  cta->linear = linear;
  cta->index = {linear % grid[0], linear / grid[0] % grid[1], linear / grid[0] / grid[1]};
  cta->slot = slot;
  cta->rank = linear % launch->cluster;
  cta->cluster = cluster;
  cluster->blocks.push_back(cta.get());
  cta->running = threads;
  cta->smem = shared_memory(slot);
  memset(cta->smem, 0xff, launch->smem_bytes);  // NaN in every element type
  cta->shadow.reset(launch->smem_bytes, State::UNINITIALISED);
  for (Barrier& barrier : cta->barriers) {
    barrier = {};
    barrier.joined.reset(agents);
  }
  cta->exited.reset(agents);
  cta->mbarriers.clear();
  cta->next_engine = 0;
  cta->engine_clocks.assign(threads / WARPGROUP_SIZE + ENGINES, 0);
  cta->warps.assign((threads + WARP_SIZE - 1) / WARP_SIZE, {});
  cta->fibers.clear();
  cta->fibers.resize(threads);
  while (stacks.size() < resident.size() * threads) stacks.push_back(new_stack());
  for (int t = 0; t < threads; ++t) start_thread(*cta, t);
  start_registers(*cta);
  start_warpgroups(*cta);
}

void Machine::start_thread(Cta& cta, int t) {
  const uint32_t* block = launch->block;
  Fiber& fiber = cta.fibers[t];
  Warp& warp = cta.warps[t / WARP_SIZE];
  fiber.stack = stacks[cta.slot * threads + t];
  fiber.cta = &cta;
  fiber.warp = &warp;
  fiber.thread = t;
  fiber.lane = t % WARP_SIZE;
  fiber.agent = cta.agent(t);
  const auto u = static_cast<unsigned>(t);
  fiber.index = {u % block[0], u / block[0] % block[1], u / block[0] / block[1]};
  fiber.clock.reset(launch->cluster * agents_per_block());
  fiber.clock.seen[fiber.agent] = 1;
  fiber.copies.assign(1, {});
  prepare(fiber.context, fiber.stack, thread_main);
  if (fiber.lane == 0) warp.elected = static_cast<int>(random() % WARP_SIZE);
  warp.cta = &cta;
  warp.number = t / WARP_SIZE;
  warp.lanes[fiber.lane] = &fiber;
  ++warp.size;
  ++warp.ready;
}

void Machine::exit_block(Cta& cta) {
  for (Warp& warp : cta.warps) warp.accesses.flush(banks);
  for (const auto& [offset, mbarrier] : cta.mbarriers) {
    const Clock issued = cta.engine_clocks[mbarrier.engine - cta.agent(threads)];
    if (cta.exited.seen[mbarrier.engine] >= issued) continue;
    stop({"unwaited", "the block ends, and no thread has waited for the copies that report to " +
          describe_mbarrier(cta, offset), &cta.fibers[0], 0, {Place::SHARED, cta.rank, offset, 8}, nullptr, {}});
  }
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
      Fiber* const fiber = warp.lanes[(first + i) % WARP_SIZE];
      if (fiber != nullptr && fiber->wait == Wait::NOTHING) resume(*fiber);
    }
  } while (warp.ready > 0 && !chance(SWITCH_WARP));
}

void Machine::start(std::unique_ptr<Operation> operation) {
  if (policy != Policy::EAGER) {
    operations.push_back(std::move(operation));
    return;
  }
  while (!operation->step()) {
  }
}

bool Machine::step_async() {
  bool (*const kinds[])(Machine&) = {finish_copies, run_operations, run_products};
  const size_t first = random() % 3;
  for (size_t i = 0; i < 3; ++i) {
    if (kinds[(first + i) % 3](*this)) return true;
  }
  return false;
}

static size_t most_resident() { return std::min<size_t>(machine.launch->most_resident, MAX_RESIDENT); }

// More blocks become resident: the ones that are cannot go on, and may wait for others.
bool Machine::grow() {
  if (next_cluster_ >= order_.size() || resident.size() + launch->cluster > most_resident()) return false;
  const int slot = static_cast<int>(resident.size());
  resident.resize(resident.size() + launch->cluster);
  start_cluster(slot);
  return true;
}

// Those that ask "is it so yet?" get a no, as the hardware gives it after a while; in vain too often is a deadlock.
bool Machine::wake_pollers() {
  bool any = false;
  if (++idle_polls_ > MAX_IDLE_POLLS) return false;
  for (const auto& cta : resident) {
    for (Fiber& fiber : cta->fibers) {
      if (fiber.wait != Wait::POLL) continue;
      fiber.wake();
      any = true;
    }
  }
  return any;
}

void Machine::prepare_run() {
  random_state_ = (launch->seed + 1) * 0x9e3779b97f4a7c15ULL | 1;
  policy = static_cast<Policy>(launch->policy);
  threads = static_cast<int>(launch->block[0] * launch->block[1] * launch->block[2]);
  switches = accesses = next_cluster_ = 0;
  idle_polls_ = 0;
  in_flight.clear();
  operations.clear();
  banks.clear();
  forget_semaphores();
  trace.start(launch->costs, launch->traced_block, static_cast<uint32_t>((threads + WARP_SIZE - 1) / WARP_SIZE));
  order_.resize(launch->grid[0] * launch->grid[1] * launch->grid[2] / launch->cluster);
  for (uint32_t i = 0; i < order_.size(); ++i) order_[i] = i;
  // As on a GPU, no block starts long before those of lower indices: kernels may wait for these.
  for (size_t first = 0; first < order_.size(); first += START_WINDOW) {
    const size_t count = std::min(START_WINDOW, order_.size() - first);
    uint32_t* const window = order_.data() + first;
    if (policy == Policy::LAZY) std::reverse(window, window + count);
    if (policy != Policy::RANDOM) continue;
    for (size_t i = count; i > 1; --i) std::swap(window[i - 1], window[random() % i]);
  }
  for (const auto& cta : resident) {
    if (cta != nullptr) cta->shadow.reset(0, State::UNINITIALISED);
  }
  resident.clear();
  const size_t clusters = std::max<size_t>(std::min<size_t>(launch->resident, most_resident()) / launch->cluster, 1);
  resident.resize(launch->cluster * std::min(clusters, order_.size()));
  for (size_t slot = 0; slot < resident.size(); slot += launch->cluster) start_cluster(static_cast<int>(slot));
}

// The cluster of `cta` has ended: the next one takes its place.
void Machine::replace(Cta& cta) {
  const auto cluster = cta.cluster;
  for (const Cta* block : cluster->blocks) {
    if (block->running > 0) return;
  }
  for (const auto& operation : operations) {
    const Cta* const target = operation->target();
    if (target == nullptr || target->cluster != cluster) continue;
    stop({"unwaited", "the block ends while a copy into its shared memory is in flight", &target->fibers[0], 0, {},
          nullptr, {}});
  }
  while (run_operations(*this)) {  // stores may outlive their block, but not what they need of it here
  }
  for (Cta* block : cluster->blocks) exit_block(*block);
  done_ += launch->cluster;
  const int slot = cluster->blocks[0]->slot;
  if (next_cluster_ < order_.size()) start_cluster(slot);
}

void Machine::run() {
  prepare_run();
  done_ = 0;
  std::vector<Warp*> warps;
  auto last_beat = std::chrono::steady_clock::now();
  while (done_ < order_.size() * launch->cluster) {
    warps.clear();
    for (const auto& cta : resident) {
      if (cta->running == 0) continue;
      for (Warp& warp : cta->warps) {
        if (warp.ready > 0) warps.push_back(&warp);
      }
    }
    if (warps.empty()) {
      if (!step_async() && !grow() && !wake_pollers()) deadlock();
      continue;
    }
    if (policy == Policy::RANDOM && chance(STEP_ASYNC)) step_async();
    Warp& warp = *warps[random() % warps.size()];
    run_warp(warp);
    if (warp.cta->running == 0) replace(*warp.cta);
    if (std::chrono::steady_clock::now() - last_beat > BEAT) {
      last_beat = std::chrono::steady_clock::now();
      launch->beat(done_);
    }
  }
}

static std::string waited_for(const Fiber& fiber) {
  const Cta& cta = *fiber.cta;
  const auto of = [](int arrived, int expected) {
    return " (" + std::to_string(arrived) + " of " + std::to_string(expected) + " arrived)";
  };
  switch (fiber.wait) {
    case Wait::COLLECTIVE:
      return "the other lanes of its warp" + of(fiber.warp->arrived, WARP_SIZE);
    case Wait::BARRIER: {
      const Barrier& barrier = cta.barriers[fiber.wait_for];
      return "barrier " + std::to_string(fiber.wait_for) + of(barrier.arrived, barrier.expected);
    }
    case Wait::CLUSTER_BARRIER:
      return "the cluster's barrier" +
             of(cta.cluster->arrived, machine.threads * static_cast<int>(machine.launch->cluster));
    case Wait::POLL:
      if (fiber.waits_on == POLLS_DEVICE_MEMORY) return "a semaphore in device memory to change";
      [[fallthrough]];
    case Wait::MBARRIER:
      return describe_mbarrier(cta, static_cast<uint32_t>(fiber.waits_on)) + ", parity " +
             std::to_string(fiber.wait_for);
    case Wait::WGMMA:
      return "its wgmma groups, which not all threads of the warpgroup have issued";
    case Wait::REGISTERS:
      return "setmaxnreg.inc to " + std::to_string(fiber.wait_for) + " (" + std::to_string(cta.registers_free) +
             " registers free in the block)";
    case Wait::SEMAPHORE:
      return "a semaphore in device memory to become " + std::to_string(fiber.wait_for);
    case Wait::EXITED:
      return "";
    default:
      return "its copies";
  }
}

void Machine::deadlock() {
  std::map<std::pair<uint32_t, std::string>, Waiters> groups;
  for (const auto& cta : resident) {
    for (const Fiber& fiber : cta->fibers) {
      const std::string what = waited_for(fiber);
      if (cta->running == 0) continue;
      auto& group = groups.try_emplace({cta->linear, what}, Waiters{0, cta->linear, fiber.thread, fiber.pc, what})
                        .first->second;
      ++group.count;
    }
  }
  Fault fault{"deadlock", "no thread can go on", nullptr, 0, {}, nullptr, {}};
  for (const auto& [key, waiters] : groups) fault.waiters.push_back(waiters);
  stop(fault);
}

// ---- warp collectives

Trace* traced(const Fiber& fiber) {
  return fiber.lane == 0 && machine.trace.follows(*fiber.cta) ? &machine.trace : nullptr;
}

static void time_collective(Warp& warp, Kind kind) {
  Trace& trace = machine.trace;
  if (!trace.follows(*warp.cta)) return;
  const Costs& costs = trace.costs();
  const double clocks = kind == Kind::TENSOR ? costs.mma : kind == Kind::FRAGMENTS ? costs.fragments : costs.shuffle;
  trace.work(warp, kind, warp.lanes[0]->pc, clocks);
}

void meet(Fiber& fiber, Collective collective, void* arguments, Kind kind) {
  Warp& warp = *fiber.warp;
  if (warp.size < WARP_SIZE) fail(fiber, "collective", {}, "a collective in a warp of %d lanes", warp.size);
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
  time_collective(warp, kind);
  collective(warp);
  for (Fiber* lane : warp.lanes) {
    if (lane != &fiber) lane->wake();
  }
}

}  // namespace emu
