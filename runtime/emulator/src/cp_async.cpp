// cp.async (PTX ISA 9.7.9.25.3). A copy reads and writes at a moment between its issue and the end of the wait that
// covers its group; until then its target may not be touched by anyone.
#include <cstring>
#include <utility>

#include "memory.h"

namespace emu {

namespace {

void execute(const Copy& copy) {
  memcpy(copy.target, copy.source, copy.bytes);
  memset(copy.target + copy.bytes, 0, 16 - copy.bytes);
}

bool satisfied(const Fiber& fiber, int pending) {
  for (size_t i = 0; i + 1 + static_cast<size_t>(pending) < fiber.copies.size(); ++i) {
    if (fiber.copies[i].unfinished > 0) return false;
  }
  return true;
}

void finish(const Copy& copy) {
  execute(copy);
  --copy.group->unfinished;
  Fiber& fiber = *copy.fiber;
  if (fiber.wait == Wait::CP_ASYNC && satisfied(fiber, fiber.wait_for)) fiber.wake();
}

}  // namespace

bool finish_copies(Machine& m) {
  if (m.in_flight.empty()) return false;
  size_t count = 1 + m.random() % m.in_flight.size();
  if (m.policy == Policy::LAZY) count = 1;
  for (; count > 0; --count) {
    Copy& chosen = m.in_flight[m.random() % m.in_flight.size()];
    finish(chosen);
    std::swap(chosen, m.in_flight.back());
    m.in_flight.pop_back();
  }
  return true;
}

void check_copies_at_exit(Fiber& fiber) {
  for (const CopyGroup& group : fiber.copies) {
    if (group.targets.empty()) continue;
    fail(fiber, "unwaited", {Place::SHARED, 0, group.targets[0], 16},
         "the thread exits with copies that it has not waited for");
  }
}

void cp_async(void* smem, const void* gmem, uint32_t bytes) {
  Fiber& fiber = enter(__builtin_return_address(0));
  if (bytes != 0 && bytes != 16) fail(fiber, "argument", {}, "cp.async of %u bytes instead of 16 or 0", bytes);
  const uint32_t offset = shared_offset(fiber, smem, 16, 16, "cp.async");
  fiber.warp->accesses.add(fiber.pc, fiber.lane, offset, 16);
  if (bytes > 0) {
    if (reinterpret_cast<uintptr_t>(gmem) % 16 != 0) fail(fiber, "misaligned", {}, "cp.async from %p", gmem);
    check(fiber, gmem, bytes, Access::READ);
  }
  check(fiber, smem, 16, Access::ASYNC_WRITE);
  CopyGroup& group = fiber.copies.back();
  group.targets.push_back(offset);
  if (Trace* const trace = traced(fiber)) group.landed = trace->copy(*fiber.warp, fiber.pc, WARP_SIZE * 16);
  const Copy copy{&fiber, &group, static_cast<unsigned char*>(smem), static_cast<const unsigned char*>(gmem), bytes};
  if (machine.policy == Policy::EAGER) {
    execute(copy);
  } else {
    memset(smem, 0xff, 16);
    ++group.unfinished;
    machine.in_flight.push_back(copy);
  }
}

void cp_async_commit() {
  Fiber& fiber = enter(__builtin_return_address(0));
  fiber.copies.emplace_back();
}

void cp_async_wait(int pending) {
  Fiber& fiber = enter(__builtin_return_address(0));
  maybe_yield(fiber);
  if (!satisfied(fiber, pending)) fiber.block(Wait::CP_ASYNC, pending);
  if (Trace* const trace = traced(fiber)) {
    for (size_t i = 0; i + 1 + static_cast<size_t>(pending) < fiber.copies.size(); ++i) {
      trace->wait_until(*fiber.warp, fiber.pc, fiber.copies[i].landed);
    }
  }
  while (fiber.copies.size() > static_cast<size_t>(pending) + 1) {
    for (const uint32_t offset : fiber.copies.front().targets) {
      fiber.cta->shadow.land(fiber.agent, fiber.clock.seen[fiber.agent], offset, 16, State::WRITTEN);
    }
    fiber.copies.pop_front();
  }
}

}  // namespace emu
