// mbarrier objects (PTX ISA 9.7.13.15). Their state lies in their own 8 bytes, so that overwriting one shows.
#include "mbarrier.h"

#include <algorithm>
#include <cstring>

#include "memory.h"

namespace emu {

namespace {

constexpr uint32_t MAX_COUNT = (1 << 20) - 1;
constexpr double SPURIOUS = 0.02;  // of the polls that may fail

struct Word {
  uint64_t phase : 1;
  uint64_t pending : 20;
  uint64_t expected : 20;
  int64_t transactions : 22;
  uint64_t alive : 1;
};
static_assert(sizeof(Word) == 8, "an mbarrier");

struct Object {
  Cta& cta;
  uint32_t offset;
  Word& word;
  Mbarrier& info;
};

Word& word_at(const Cta& cta, uint32_t offset) { return *reinterpret_cast<Word*>(cta.smem + offset); }

Object find(const Fiber& fiber, Cta& cta, const void* address, const char* what) {
  const Fiber& first = cta.fibers[0];  // offsets are those in the block that has the object
  const uint32_t offset = shared_offset(&cta == fiber.cta ? fiber : first, address, 8, 8, what);
  const auto found = cta.mbarriers.find(offset);
  if (found == cta.mbarriers.end() || !word_at(cta, offset).alive) {
    fail(fiber, "barrier", {Place::SHARED, cta.rank, offset, 8}, "%s on an mbarrier that was never initialised", what);
  }
  return {cta, offset, word_at(cta, offset), found->second};
}

void check_initialised(const Fiber& fiber, const Object& object, const char* what) {
  if (fiber.actor().after(object.info.initialised)) return;
  Fault fault{"race", std::string(what) + " on an mbarrier that nothing orders after its init by", &fiber, fiber.pc,
              {Place::SHARED, object.cta.rank, object.offset, 8}, &object.info.initialised, {}};
  stop(fault);
}

void end_phase_if_complete(const Object& object) {
  Word& word = object.word;
  if (word.pending != 0 || word.transactions != 0) return;
  object.info.ended[word.phase] = object.info.arrived;
  object.info.ended_at[word.phase] = object.info.time;
  machine.advanced();
  word.phase = !word.phase;
  word.pending = word.expected;
  for (Fiber* fiber : object.info.waiting) fiber->wake();
  object.info.waiting.clear();
}

void arrive(Fiber& fiber, const Object& object, uint32_t bytes) {
  check_initialised(fiber, object, "mbarrier.arrive");
  if (object.word.pending == 0) {
    fail(fiber, "barrier", {Place::SHARED, object.cta.rank, object.offset, 8},
         "mbarrier.arrive beyond the %u arrivals that the phase expects", static_cast<unsigned>(object.word.expected));
  }
  if (&object.cta == fiber.cta) {
    object.info.arrived.join(fiber.clock);
  } else {  // released to its own block only
    object.info.arrived.join_reads(fiber.clock);
  }
  fiber.release();
  object.info.time = std::max(object.info.time, fiber.warp->time + fiber.warp->thought);
  object.word.transactions += bytes;
  --object.word.pending;
  end_phase_if_complete(object);
}

bool ended(Fiber& fiber, const Object& object, uint32_t parity) {
  if (object.word.phase == (parity & 1)) return false;
  fiber.clock.join(object.info.ended[parity & 1]);
  if (machine.trace.follows(*fiber.cta)) {
    machine.trace.wait_until(*fiber.warp, fiber.pc, object.info.ended_at[parity & 1]);
  }
  return true;
}

}  // namespace

std::string describe_mbarrier(const Cta& cta, uint32_t offset) {
  const Word& word = word_at(cta, offset);
  return "the mbarrier at shared memory + " + std::to_string(offset) + " (" + std::to_string(word.pending) + " of " +
         std::to_string(word.expected) + " arrivals and " + std::to_string(word.transactions) + " bytes missing)";
}

void report_bytes(Cta& cta, uint32_t offset, uint32_t bytes, const VectorClock& issued, Clock landed, double time) {
  Word& word = word_at(cta, offset);
  Mbarrier& info = cta.mbarriers.at(offset);
  info.arrived.join(issued);
  Clock& known = info.arrived.seen[info.engine];
  if (known < landed) known = landed;
  info.time = std::max(info.time, time);
  word.transactions -= bytes;
  end_phase_if_complete({cta, offset, word, info});
}

Mbarrier& copy_target(const Fiber& fiber, Cta& cta, uint32_t offset) {
  const Object object = find(fiber, cta, cta.smem + offset, "a copy that reports to");
  check_initialised(fiber, object, "a copy that reports to");
  if (!object.info.fenced) {
    fail(fiber, "unfenced", {Place::SHARED, cta.rank, offset, 8},
         "a copy reports to an mbarrier whose init was not shown to the async proxy (fence_mbarrier_init)");
  }
  return object.info;
}

void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
  Fiber& fiber = enter(__builtin_return_address(0));
  const uint32_t offset = shared_offset(fiber, barrier, 8, 8, "mbarrier.init");
  if (arrivals == 0 || arrivals > MAX_COUNT) fail(fiber, "argument", {}, "mbarrier.init with %u arrivals", arrivals);
  if (fiber.cta->mbarriers.count(offset) != 0) {
    fail(fiber, "barrier", {Place::SHARED, 0, offset, 8}, "mbarrier.init of an object that is in use");
  }
  check(fiber, barrier, 8, Access::WRITE);
  fiber.cta->shadow.land(fiber.agent, fiber.clock.seen[fiber.agent], offset, 8, State::BARRIER);
  Word word{};
  word.pending = word.expected = arrivals;
  word.alive = 1;
  memcpy(barrier, &word, 8);
  Mbarrier& info = fiber.cta->mbarriers[offset];
  info.initialised = fiber.actor().now;
  info.engine = fiber.cta->new_engine();
  info.arrived.reset(fiber.clock.seen.size());
  for (VectorClock& clock : info.ended) clock.reset(fiber.clock.seen.size());
}

void fence_mbarrier_init() {
  Fiber& fiber = enter(__builtin_return_address(0));
  for (auto& [offset, info] : fiber.cta->mbarriers) {
    if (info.initialised.agent == fiber.agent) info.fenced = true;
  }
}

void mbarrier_arrive(uint64_t* barrier, uint32_t bytes) {
  Fiber& fiber = enter(__builtin_return_address(0));
  maybe_yield(fiber);
  arrive(fiber, find(fiber, *fiber.cta, barrier, "mbarrier.arrive"), bytes);
}

void mbarrier_arrive_cluster(uint64_t* barrier, uint32_t rank) {
  Fiber& fiber = enter(__builtin_return_address(0));
  maybe_yield(fiber);
  const auto* const there = static_cast<uint64_t*>(map_to_block(fiber, barrier, rank));
  Cta& cta = *fiber.cta->cluster->blocks[rank];
  if (cta.running == 0) fail(fiber, "barrier", {}, "mbarrier.arrive on a block of the cluster that has exited");
  arrive(fiber, find(fiber, cta, there, "mbarrier.arrive"), 0);
}

bool mbarrier_try_wait(uint64_t* barrier, uint32_t parity) {
  Fiber& fiber = enter(__builtin_return_address(0));
  maybe_yield(fiber);
  const Object object = find(fiber, *fiber.cta, barrier, "mbarrier.try_wait");
  check_initialised(fiber, object, "mbarrier.try_wait");
  if (ended(fiber, object, parity)) return true;
  fiber.waits_on = object.offset;
  fiber.block(Wait::POLL, static_cast<int>(parity & 1));  // until nothing else can go on
  return ended(fiber, object, parity);
}

bool mbarrier_test_wait(uint64_t* barrier, uint32_t parity) {
  Fiber& fiber = enter(__builtin_return_address(0));
  maybe_yield(fiber);
  const Object object = find(fiber, *fiber.cta, barrier, "mbarrier.test_wait");
  check_initialised(fiber, object, "mbarrier.test_wait");
  return ended(fiber, object, parity);
}

void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
  Fiber& fiber = enter(__builtin_return_address(0));
  maybe_yield(fiber);
  const Object object = find(fiber, *fiber.cta, barrier, "mbarrier.try_wait");
  check_initialised(fiber, object, "mbarrier.try_wait");
  while (!ended(fiber, object, parity)) {
    if (machine.policy == Policy::RANDOM && machine.chance(SPURIOUS)) {
      return_to_scheduler(fiber);
      continue;
    }
    object.info.waiting.push_back(&fiber);
    fiber.waits_on = object.offset;
    fiber.block(Wait::MBARRIER, static_cast<int>(parity & 1));
  }
}

}  // namespace emu
