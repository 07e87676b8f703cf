// Atomics, acquire and release on device memory: what orders blocks with each other.
#include <cstring>
#include <unordered_map>

#include "memory.h"

namespace emu {

namespace {

constexpr uint32_t NO_GROUP = UINT32_MAX;
constexpr int MAX_POLLS = 16;

struct Semaphore {
  VectorClock released;  // only its `others` are used: semaphores belong to no group
  std::vector<Fiber*> waiting;
};

std::unordered_map<const void*, Semaphore> semaphores;

uint32_t group_of(const Fiber& fiber) { return fiber.cta->cluster->group; }

void publish(Semaphore& semaphore, const VectorClock& clock, uint32_t group) {
  if (!clock.seen.empty()) semaphore.released.learn(clock, group, NO_GROUP);
}

void acquire(Fiber& fiber, const Semaphore& semaphore) {
  fiber.clock.learn(semaphore.released, NO_GROUP, group_of(fiber));
}

void wake_all(Semaphore& semaphore) {
  machine.advanced();
  for (Fiber* fiber : semaphore.waiting) fiber->wake();
  semaphore.waiting.clear();
}

void check_atomic(Fiber& fiber, const void* address, Access access, size_t alignment = 4) {
  if (reinterpret_cast<uintptr_t>(address) % alignment != 0) fail(fiber, "misaligned", {}, "an atomic at %p", address);
  Actor actor = fiber.actor();
  actor.now.atomic = true;
  check(fiber, actor, address, 4, access);
}

template <class T>
T add(Fiber& fiber, T* address, T x, size_t alignment = sizeof(T)) {
  check_atomic(fiber, address, Access::ATOMIC, alignment);
  const T before = *address;
  *address = before + x;
  return before;
}

}  // namespace

void forget_semaphores() { semaphores.clear(); }

int atom_add(int* address, int x, bool acquires, bool releases) {
  Fiber& fiber = enter(__builtin_return_address(0));
  maybe_yield(fiber);
  const int before = add(fiber, address, x);
  Semaphore& semaphore = semaphores[address];
  if (acquires) {
    acquire(fiber, semaphore);
  } else {
    fiber.acquirable.learn(semaphore.released, NO_GROUP, NO_GROUP - 1);
  }
  publish(semaphore, releases ? fiber.clock : fiber.released, group_of(fiber));
  if (releases) fiber.release();
  wake_all(semaphore);
  return before;
}

void red_add_f32(float* address, float x) {
  Fiber& fiber = enter(__builtin_return_address(0));
  maybe_yield(fiber);
  add(fiber, address, x);
}

void red_add_f32x4(float* address, float x, float y, float z, float w) {
  Fiber& fiber = enter(__builtin_return_address(0));
  maybe_yield(fiber);
  add(fiber, address, x, 4 * sizeof(float));
  add(fiber, address + 1, y);
  add(fiber, address + 2, z);
  add(fiber, address + 3, w);
}

void red_add2(Type type, void* address, uint32_t x) {
  Fiber& fiber = enter(__builtin_return_address(0));
  maybe_yield(fiber);
  check_atomic(fiber, address, Access::ATOMIC);
  uint32_t& pair = *static_cast<uint32_t*>(address);
  const uint32_t one = pack2(type, 1.0f, 1.0f);
  pair = fma2(type, x, one, pair);
}

int ld_acquire(const int* address) {
  Fiber& fiber = enter(__builtin_return_address(0));
  return_to_scheduler(fiber);  // whoever polls must let others run
  fiber.polls = fiber.polled == address && fiber.polled_value == *address ? fiber.polls + 1 : 0;
  fiber.polled = address;
  fiber.polled_value = *address;
  if (fiber.polls > MAX_POLLS) {
    fiber.waits_on = POLLS_DEVICE_MEMORY;
    fiber.block(Wait::POLL);  // until nothing else can go on
  }
  check_atomic(fiber, address, Access::READ);
  acquire(fiber, semaphores[address]);
  return *address;
}

void st_release(int* address, int value) {
  Fiber& fiber = enter(__builtin_return_address(0));
  maybe_yield(fiber);
  check_atomic(fiber, address, Access::ATOMIC);
  *address = value;
  Semaphore& semaphore = semaphores[address];
  semaphore.released = {};
  publish(semaphore, fiber.clock, group_of(fiber));
  fiber.release();
  wake_all(semaphore);
}

void wait_until_equal(const int* address, int value) {
  Fiber& fiber = enter(__builtin_return_address(0));
  maybe_yield(fiber);
  check_atomic(fiber, address, Access::READ);
  while (*address != value) {
    semaphores[address].waiting.push_back(&fiber);
    fiber.block(Wait::SEMAPHORE, value);
  }
  acquire(fiber, semaphores[address]);
}

void fence_acq_rel() {
  Fiber& fiber = enter(__builtin_return_address(0));
  fiber.clock.learn(fiber.acquirable, NO_GROUP, group_of(fiber));
  fiber.released = fiber.clock;
  fiber.release();
}

void fence_proxy_async(bool global) {
  Fiber& fiber = enter(__builtin_return_address(0));
  fiber.clock.fence(global ? Space::GLOBAL : Space::SHARED, fiber.agent);
  fiber.release();  // what it writes after this is not covered
}

}  // namespace emu
