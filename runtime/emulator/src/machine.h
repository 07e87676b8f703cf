// The machine: resident blocks, their warps and threads, and the scheduler. All state of a block is in its Cta.
#pragma once
#include <cstdint>
#include <deque>
#include <memory>
#include <unordered_map>
#include <vector>

#include "../host/emu.h"
#include "banks.h"
#include "clocks.h"
#include "fiber.h"

namespace emu {

constexpr int WARP_SIZE = 32;
constexpr int MAX_BARRIERS = 16;
constexpr uint32_t SMEM_WINDOW = 1024;  // 32-bit shared address of the first dynamic byte: the driver keeps the rest

struct Cta;
struct Fiber;
struct Warp;

enum class Wait : uint8_t { NOTHING, COLLECTIVE, BARRIER, CP_ASYNC, EXITED };
enum class Policy : uint32_t { EAGER, LAZY, RANDOM };

// The copies of one cp.async group that have not been waited for.
struct CopyGroup {
  int unfinished = 0;
  std::vector<uint32_t> targets;  // shared-memory offsets, 16 bytes each
};

struct Fiber {
  Context context;
  unsigned char* stack = nullptr;
  Cta* cta = nullptr;
  Warp* warp = nullptr;
  int thread = 0;  // in its block
  int lane = 0;
  uint16_t agent = 0;
  Index3 index{};
  uint32_t pc = 0;  // of the drawer call or access that it is in
  Wait wait = Wait::NOTHING;
  int wait_for = 0;   // barrier number, or how many copy groups may stay in flight
  bool vote = false;  // result of the last barrier
  VectorClock clock;
  std::deque<CopyGroup> copies;  // the last one is still open

  Actor actor() const;
  void block(Wait reason, int detail = 0);  // returns when another has called wake()
  void wake();
  void release() { ++clock.seen[agent]; }   // what it does from now on is not covered by what others saw of it
};

using Collective = void (*)(Warp&);

struct Warp {
  Cta* cta = nullptr;
  Fiber* lanes[WARP_SIZE] = {};
  int ready = 0;  // lanes that can run
  int arrived = 0;
  Collective collective = nullptr;
  void* arguments[WARP_SIZE] = {};
  PendingAccesses accesses;
};

struct Barrier {
  int expected = 0;
  int arrived = 0;
  bool vote = false;
  VectorClock joined;
  std::vector<Fiber*> waiting;
};

struct Cta {
  uint32_t linear = 0;  // position in the grid, x fastest
  Index3 index{};
  int slot = 0;
  int running = 0;      // threads that have not exited
  unsigned char* smem = nullptr;
  Shadow shadow;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Barrier barriers[MAX_BARRIERS];
};

// A tensor. `sizes` and `strides` (bytes, falling) leave out the innermost run; rank 0: one run.
struct Buffer {
  unsigned char* data;
  uint64_t bytes;
  uint64_t run_bytes;
  uint32_t writable;
  uint32_t initialised;
  uint32_t rank;
  int64_t sizes[5];
  int64_t strides[5];
};

struct Launch {  // mirrored in runtime/emulator/worker.py
  void (*entry)(const void*);
  const void* params;
  uint32_t grid[3];
  uint32_t block[3];
  uint32_t smem_bytes;
  uint32_t resident;  // blocks at a time
  uint64_t seed;
  uint32_t policy;
  uint32_t num_buffers;
  const Buffer* buffers;
  void (*beat)(uint32_t blocks_done);  // called a few times per second while the launch advances
};

// A pending 16-byte copy.
struct Copy {
  Fiber* fiber;
  CopyGroup* group;
  unsigned char* target;
  const unsigned char* source;
  uint32_t bytes;
};

struct Machine {
  const Launch* launch = nullptr;
  Policy policy = Policy::EAGER;
  int threads = 0;
  std::vector<std::unique_ptr<Cta>> resident;
  std::deque<Shadow> global;  // by buffer
  std::vector<Copy> in_flight;
  BankSites banks;
  uint64_t switches = 0;
  uint64_t accesses = 0;
  Context scheduler;

  void run();
  uint64_t random();
  bool chance(double probability);

 private:
  uint64_t random_state_ = 0;
  uint32_t next_block_ = 0;
  std::vector<uint32_t> order_;  // of the blocks

  void start_block(int slot);
  void run_warp(Warp& warp);
  void resume(Fiber& fiber);
  bool step_async();
  void exit_block(Cta& cta);
  [[noreturn]] void deadlock();
};

extern Machine machine;
extern Fiber* current;  // null while the scheduler runs
extern bool on_scheduler_stack;

void return_to_scheduler(Fiber& fiber);  // comes back when it is its turn again

// A drawer call begins: remembers where.
Fiber& enter(const void* return_address);
void maybe_yield(Fiber& fiber);  // lets others run now and then

// All lanes of the warp bring `arguments`; the last one runs `collective` for all.
void meet(Fiber& fiber, Collective collective, void* arguments);

bool finish_copies(Machine& m);         // cp_async.cpp: runs some pending copies by policy; false if there were none
void check_copies_at_exit(Fiber& fiber);

}  // namespace emu
