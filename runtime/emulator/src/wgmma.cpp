// wgmma (PTX ISA 9.7.15): products of a warpgroup, issued by its 128 threads, executed in order at a later moment.
// Shared memory is read at the execution; accumulators live outside the threads' registers until the wait.
#include <algorithm>
#include <cstring>

#include "memory.h"
#include "wgmma.h"

namespace emu {

namespace {

constexpr double FLOP_PER_COLUMN = 2.0 * 64 * 16;
constexpr uint32_t POISON = 0x7fc0dead;  // a NaN: what a thread finds in registers that are not its own
constexpr uint64_t RESERVED_BITS = 0x3ffULL << 52 | 0x7ULL << 46 | 0x3ULL << 30 | 0x3ULL << 14;

Warpgroup& warpgroup_of(const Fiber& fiber) {
  const size_t index = static_cast<size_t>(fiber.thread / WARPGROUP_SIZE);
  if (index >= fiber.cta->warpgroups.size()) fail(fiber, "collective", {}, "wgmma outside a warpgroup of 128 threads");
  return *fiber.cta->warpgroups[index];
}

struct Range {
  const unsigned char *begin, *end;
};

void subtract(std::vector<OwnedRegisters>& ranges, const Range& range) {
  std::vector<OwnedRegisters> rest;
  for (const OwnedRegisters& r : ranges) {
    if (range.end <= r.begin || range.begin >= r.end) {
      rest.push_back(r);
      continue;
    }
    if (r.begin < range.begin) rest.push_back({r.begin, range.begin, r.readable, r.finished, r.group});
    if (range.end < r.end) rest.push_back({range.end, r.end, r.readable, r.finished, r.group});
  }
  ranges = rest;
}

Range range_of(const void* registers, size_t bytes) {
  const auto* const begin = static_cast<const unsigned char*>(registers);
  return {begin, begin + bytes};
}

void check_fenced(const Fiber& fiber, const Range& range, const char* what) {
  for (const OwnedRegisters& r : fiber.fenced) {
    if (r.begin <= range.begin && range.end <= r.end) return;
  }
  fail(fiber, "registers", {}, "%s of a wgmma that no wgmma_fence has listed since they were last the thread's", what);
}

bool can_execute(const Warpgroup& warpgroup) {
  const uint64_t index = warpgroup.executed - warpgroup.base;
  return index < warpgroup.products.size() && warpgroup.products[index]->issued_by == WARPGROUP_SIZE;
}

// ---- groups

bool covered(const Fiber& fiber, const Product& product, int pending) {
  return product.group + static_cast<uint64_t>(pending) < fiber.product_groups;
}

bool satisfied(const Fiber& fiber, const Warpgroup& warpgroup, int pending) {
  for (const auto& product : warpgroup.products) {
    if (!product->done && covered(fiber, *product, pending)) return false;
  }
  return true;
}

void execute_and_wake(Warpgroup& warpgroup) {
  execute_product(warpgroup);
  for (int t = 0; t < WARPGROUP_SIZE; ++t) {
    Fiber& fiber = warpgroup.cta->fibers[warpgroup.first_thread + t];
    if (fiber.wait == Wait::WGMMA && satisfied(fiber, warpgroup, fiber.wait_for)) fiber.wake();
  }
}

// Gives the thread its accumulators back, and forgets products that all threads have waited for.
void collect(Fiber& fiber, Warpgroup& warpgroup, int pending) {
  const int lane = fiber.thread - warpgroup.first_thread;
  for (uint64_t i = fiber.products_collected; i < fiber.products; ++i) {
    Product& product = *warpgroup.products[i - warpgroup.base];
    if (!covered(fiber, product, pending)) break;
    fiber.clock.seen[warpgroup.agent] = std::max(fiber.clock.seen[warpgroup.agent], product.moment);
    if (machine.trace.follows(*fiber.cta)) machine.trace.wait_until(*fiber.warp, fiber.pc, product.time);
    ++product.collected_by;
    ++fiber.products_collected;
  }
  for (auto& accumulator : warpgroup.accumulators) {
    const bool here = accumulator->where[lane] != nullptr && !accumulator->returned[lane];
    if (!here || accumulator->last_group + static_cast<uint64_t>(pending) >= fiber.product_groups) continue;
    memcpy(accumulator->where[lane], &accumulator->values[lane * accumulator->registers],
           sizeof(float) * static_cast<size_t>(accumulator->registers));
    accumulator->returned[lane] = true;
    ++accumulator->num_returned;
  }
  auto& all = warpgroup.accumulators;
  for (size_t i = all.size(); i > 0; --i) {
    if (all[i - 1]->num_returned == WARPGROUP_SIZE) all.erase(all.begin() + static_cast<int64_t>(i - 1));
  }
  for (OwnedRegisters& owned : fiber.owned) {
    owned.finished = owned.finished || owned.group + static_cast<uint64_t>(pending) < fiber.product_groups;
  }
  while (!warpgroup.products.empty() && warpgroup.products.front()->collected_by == WARPGROUP_SIZE) {
    warpgroup.products.pop_front();
    ++warpgroup.base;
  }
}

// ---- issue

void own(Fiber& fiber, const Range& range, bool readable) {
  for (OwnedRegisters& owned : fiber.owned) {
    if (owned.begin == range.begin && owned.end == range.end) {
      owned.group = fiber.product_groups;
      owned.finished = false;
      return;
    }
  }
  fiber.owned.push_back({range.begin, range.end, readable, false, fiber.product_groups});
}

void take_accumulator(Fiber& fiber, Warpgroup& warpgroup, Product& product, float* d) {
  const int lane = fiber.thread - warpgroup.first_thread, registers = product.n / 2;
  const Range range = range_of(d, sizeof(float) * static_cast<size_t>(registers));
  std::shared_ptr<Accumulator> mine;
  for (const auto& accumulator : warpgroup.accumulators) {
    if (accumulator->where[lane] == d && !accumulator->returned[lane]) mine = accumulator;
  }
  const bool chained = mine != nullptr;
  if (chained && (mine->registers != registers || (product.accumulator != nullptr && product.accumulator != mine))) {
    fail(fiber, "registers", {}, "a wgmma takes registers of an unfinished one with another shape");
  }
  if (!chained) {
    check_fenced(fiber, range, "accumulators");
    if (product.accumulator != nullptr && product.accumulator->where[lane] != nullptr) {
      fail(fiber, "registers", {}, "threads of the warpgroup chain different accumulators");
    }
    mine = product.accumulator;
    if (mine == nullptr) {
      mine = std::make_shared<Accumulator>();
      mine->registers = registers;
      mine->values.resize(static_cast<size_t>(WARPGROUP_SIZE * registers));
      warpgroup.accumulators.push_back(mine);
    }
    mine->where[lane] = d;
    memcpy(&mine->values[lane * registers], d, sizeof(float) * static_cast<size_t>(registers));
    for (int i = 0; i < registers; ++i) memcpy(d + i, &POISON, sizeof POISON);
    subtract(fiber.fenced, range);
  }
  product.accumulator = mine;
  mine->last_group = product.group;
  own(fiber, range, false);
}

void check_descriptor(const Fiber& fiber, uint64_t descriptor) {
  const auto text = static_cast<unsigned long long>(descriptor);
  if (descriptor & RESERVED_BITS) fail(fiber, "argument", {}, "wgmma descriptor 0x%llx: a reserved bit is set", text);
  if (descriptor >> 49 & 7) fail(fiber, "argument", {}, "wgmma descriptor 0x%llx: its base offset is not 0", text);
}

// `clock`, empty at first, becomes what it and `other` have both seen.
void meet(VectorClock& clock, const VectorClock& other) {
  if (clock.seen.empty()) {
    clock = other;
  } else {
    clock.meet(other);
  }
}

void issue(Fiber& fiber, Issue fresh, float* d, const uint32_t* fragments) {
  maybe_yield(fiber);
  Warpgroup& warpgroup = warpgroup_of(fiber);
  const int lane = fiber.thread - warpgroup.first_thread;
  if (!fresh.a_in_registers) check_descriptor(fiber, fresh.a);
  check_descriptor(fiber, fresh.b);
  fresh.group = fiber.product_groups;
  fresh.pc = fiber.pc;
  const uint64_t index = fiber.products++ - warpgroup.base;
  if (index == warpgroup.products.size()) {
    warpgroup.products.push_back(std::make_unique<Product>(fresh));
  } else if (!warpgroup.products[index]->same_as(fresh)) {
    fail(fiber, "collective", {}, "threads of a warpgroup issue different wgmmas");
  }
  Product& product = *warpgroup.products[index];
  if (fragments != nullptr) {
    const Range range = range_of(fragments, sizeof product.fragments[lane]);
    bool unfinished = false;  // those of an unfinished product may be used again
    for (const OwnedRegisters& owned : fiber.owned) unfinished |= owned.begin == range.begin && !owned.finished;
    if (!unfinished) check_fenced(fiber, range, "fragments");
    memcpy(product.fragments[lane], fragments, sizeof product.fragments[lane]);
    subtract(fiber.fenced, range);
    own(fiber, range, true);
  }
  take_accumulator(fiber, warpgroup, product, d);
  meet(product.warps[lane / WARP_SIZE], fiber.clock);
  fiber.release();
  product.time = std::max(product.time, fiber.warp->time + fiber.warp->thought);
  if (++product.issued_by < WARPGROUP_SIZE) return;
  for (const VectorClock& warp : product.warps) meet(product.all, warp);
  if (machine.trace.follows(*fiber.cta)) {
    product.time = machine.trace.product(product.time, product.pc, FLOP_PER_COLUMN * product.n);
  }
  product.moment = fiber.cta->tick(warpgroup.agent);
  if (machine.policy == Policy::EAGER) execute_and_wake(warpgroup);
}

// What a product has whichever way its A operand comes.
Issue product_with(Type type, int n, uint64_t b, bool b_mn_major, int scale_d) {
  Issue product;
  product.type = type;
  product.n = n;
  product.b = b;
  product.b_mn_major = b_mn_major;
  product.adds = scale_d != 0;
  return product;
}

}  // namespace

void start_warpgroups(Cta& cta) {
  cta.warpgroups.clear();
  for (int i = 0; i < machine.threads / WARPGROUP_SIZE; ++i) {
    auto warpgroup = std::make_shared<Warpgroup>();
    warpgroup->cta = &cta;
    warpgroup->first_thread = i * WARPGROUP_SIZE;
    warpgroup->agent = cta.agent(machine.threads + i);
    cta.warpgroups.push_back(warpgroup);
  }
}

bool run_products(Machine& m) {
  std::vector<Warpgroup*> ready;
  for (const auto& cta : m.resident) {
    for (const auto& warpgroup : cta->warpgroups) {
      if (can_execute(*warpgroup)) ready.push_back(warpgroup.get());
    }
  }
  if (ready.empty()) return false;
  execute_and_wake(*ready[m.random() % ready.size()]);
  return true;
}

void check_products_at_exit(Fiber& fiber) {
  if (fiber.products > fiber.products_collected) {
    fail(fiber, "unwaited", {}, "the thread exits with wgmmas that it has not waited for");
  }
}

void wgmma_ss(Type type, int n, float* d, uint64_t a, bool a_mn_major, uint64_t b, bool b_mn_major, int scale_d) {
  Fiber& fiber = enter(__builtin_return_address(0));
  Issue product = product_with(type, n, b, b_mn_major, scale_d);
  product.a = a;
  product.a_mn_major = a_mn_major;
  issue(fiber, product, d, nullptr);
}

void wgmma_rs(Type type, int n, float* d, const uint32_t* a, uint64_t b, bool b_mn_major, int scale_d) {
  Fiber& fiber = enter(__builtin_return_address(0));
  Issue product = product_with(type, n, b, b_mn_major, scale_d);
  product.a_in_registers = true;
  issue(fiber, product, d, a);
}

void wgmma_fence(const void* registers, unsigned long bytes) {
  Fiber& fiber = enter(__builtin_return_address(0));
  const Range range = range_of(registers, bytes);
  check_registers(fiber, range.begin, bytes, true);
  subtract(fiber.fenced, range);
  fiber.fenced.push_back({range.begin, range.end, true, true, 0});
}

void wgmma_commit() {
  Fiber& fiber = enter(__builtin_return_address(0));
  ++fiber.product_groups;
}

void wgmma_wait(int pending) {
  Fiber& fiber = enter(__builtin_return_address(0));
  maybe_yield(fiber);
  Warpgroup& warpgroup = warpgroup_of(fiber);
  if (!satisfied(fiber, warpgroup, pending)) fiber.block(Wait::WGMMA, pending);
  collect(fiber, warpgroup, pending);
}

void wgmma_finished(const void* registers, unsigned long bytes) {
  Fiber& fiber = enter(__builtin_return_address(0));
  const Range range = range_of(registers, bytes);
  for (const OwnedRegisters& owned : fiber.owned) {
    if (range.end <= owned.begin || range.begin >= owned.end || owned.finished) continue;
    fail(fiber, "registers", {}, "wgmma_wait lists registers of a wgmma that it does not wait for");
  }
  subtract(fiber.owned, range);
}

}  // namespace emu
