// The machine: resident blocks, their warps and threads, and the scheduler. All state of a block is in its Cta.
#pragma once
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "../host/emu.h"
#include "banks.h"
#include "clocks.h"
#include "fiber.h"
#include "trace.h"

namespace emu {

constexpr int WARP_SIZE = 32;
constexpr int MAX_BARRIERS = 16;
constexpr uint64_t POLLS_DEVICE_MEMORY = UINT64_MAX;  // Fiber::waits_on
constexpr int WARPGROUP_SIZE = 128;
constexpr int ENGINES = 64;  // agents of one block for its asynchronous copies
constexpr uint32_t SMEM_WINDOW = 1024;  // 32-bit shared address of the first dynamic byte: the driver keeps the rest

struct Cta;
struct Fiber;
struct Warp;

enum class Wait : uint8_t {
  NOTHING, COLLECTIVE, BARRIER, CLUSTER_BARRIER, MBARRIER, CP_ASYNC, BULK, WGMMA, REGISTERS, SEMAPHORE, POLL, EXITED
};
enum class Policy : uint32_t { EAGER, LAZY, RANDOM };

// The copies of one cp.async group that have not been waited for.
struct CopyGroup {
  int unfinished = 0;
  double landed = 0;              // traced
  std::vector<uint32_t> targets;  // shared-memory offsets, 16 bytes each
};

// The bulk stores of one thread. Their reads of shared memory and their writes are agents of their own, whose clocks
// count groups.
struct BulkStores {
  struct Group {
    int issued = 0, reading = 0, writing = 0;
  };
  std::vector<Group> groups = std::vector<Group>(1);  // the last one is still open
  size_t read_waited = 0;                             // groups whose reading a wait has covered
  uint16_t reader = 0, writer = 0;                    // agents, 0: none yet
};

// Registers of a thread that belong to an unfinished wgmma: accumulators, or fragments of a.
struct OwnedRegisters {
  const unsigned char* begin;
  const unsigned char* end;
  bool readable;
  bool finished;   // a wait has covered it; the thread's again once that wait lists it
  uint64_t group;  // the last one that uses it
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
  uint32_t pc = 0;  // of the PTX wrapper or access that it is in
  Wait wait = Wait::NOTHING;
  int wait_for = 0;   // barrier number, or how many copy groups may stay in flight
  bool vote = false;  // result of the last barrier
  uint64_t arrived_in[MAX_BARRIERS] = {};  // the phase of each barrier that it last arrived in
  VectorClock clock;
  std::deque<CopyGroup> copies;  // the last one is still open
  BulkStores bulk;
  std::vector<OwnedRegisters> owned;
  std::vector<OwnedRegisters> fenced;  // listed in a wgmma_fence since they were last owned
  uint64_t products = 0;               // wgmmas issued
  uint64_t products_collected = 0;     // and waited for
  uint64_t product_groups = 0;         // committed
  bool cluster_arrived = false;        // at the cluster's barrier, and not yet waited
  uint64_t waits_on = 0;               // what `wait` is about: an offset, a phase
  const int* polled = nullptr;         // the semaphore it last read, what it read, and how often in a row
  int polled_value = 0, polls = 0;
  VectorClock released;                // what its last fence.acq_rel releases through relaxed atomics
  VectorClock acquirable;              // what relaxed atomics have read, for its next fence.acq_rel

  Actor actor() const;
  void block(Wait reason, int detail = 0);  // returns when another has called wake()
  void wake();
  void release() { ++clock.seen[agent]; }   // what it does from now on is not covered by what others saw of it
  bool exited() const { return wait == Wait::EXITED; }
};

using Collective = void (*)(Warp&);

struct Warp {
  Cta* cta = nullptr;
  Fiber* lanes[WARP_SIZE] = {};
  int size = 0;
  int ready = 0;  // lanes that can run
  int arrived = 0;
  int registers = 0;  // of each thread
  int elected = 0;    // the lane that elect_one() picks
  int number = 0;     // in its block
  double time = 0, thought = 0;  // clocks, where the block is traced
  uint32_t thought_pc = 0;
  Collective collective = nullptr;
  void* arguments[WARP_SIZE] = {};
  PendingAccesses accesses;
};

struct Barrier {
  int expected = 0;
  int arrived = 0;
  bool vote = false;
  uint64_t phase = 1;
  VectorClock joined;
  std::vector<Fiber*> waiting;
};

// What the machine knows of an mbarrier beside the 8 bytes of its state.
struct Mbarrier {
  VectorClock arrived;       // joined over all arrivals and landed copies
  VectorClock ended[2];      // as it was at the end of the last phase of each parity
  Moment initialised;
  bool fenced = false;       // its init has been shown to the async proxy
  uint16_t engine = 0;       // agent of the copies that report to it
  double time = 0, ended_at[2] = {};  // traced: of the phase so far, and of the last ones
  std::vector<Fiber*> waiting;
};

struct Warpgroup;

// Blocks that run together and can reach each other's shared memory.
struct Cluster {
  uint32_t group = 0;
  std::vector<Cta*> blocks;
  int arrived = 0;     // threads at the cluster's barrier
  VectorClock joined;  // over all that have released there
  VectorClock ended;   // as it was when the last phase ended
  std::vector<Fiber*> waiting;
  uint64_t phase = 0;
};

struct Cta {
  uint32_t linear = 0;  // position in the grid, x fastest
  Index3 index{};
  int slot = 0;
  uint32_t rank = 0;    // in its cluster
  std::shared_ptr<Cluster> cluster;
  int registers_free = 0;
  int next_engine = 0;
  int running = 0;      // threads that have not exited
  unsigned char* smem = nullptr;
  Shadow shadow;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Barrier barriers[MAX_BARRIERS];
  std::map<uint32_t, Mbarrier> mbarriers;  // by offset
  VectorClock exited;                      // joined over the threads that have exited
  std::vector<std::shared_ptr<Warpgroup>> warpgroups;

  uint16_t agent(int local) const;  // number of an agent of this block in the cluster
  uint16_t new_engine();
  // The clock of an engine ticks.
  std::vector<Clock> engine_clocks;
  Clock tick(uint16_t agent);
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
  uint32_t cluster;    // blocks in one
  uint32_t registers;  // of each thread at the start
  uint32_t resident;   // blocks at a time, more if those cannot go on without them
  uint32_t most_resident;
  uint64_t seed;
  uint32_t policy;
  uint32_t num_buffers;
  const Buffer* buffers;
  int64_t traced_block;  // -1: none
  Costs costs;
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

// Asynchronous work of an engine. step() does a part of it and returns whether that was the last.
struct Operation {
  virtual ~Operation() = default;
  virtual bool step() = 0;
  virtual const Cta* target() const { return nullptr; }  // the block whose shared memory it writes
};

struct Machine {
  const Launch* launch = nullptr;
  Policy policy = Policy::EAGER;
  int threads = 0;
  std::vector<std::unique_ptr<Cta>> resident;
  std::deque<Shadow> global;  // by buffer
  std::vector<Copy> in_flight;
  std::vector<std::unique_ptr<Operation>> operations;
  BankSites banks;
  Trace trace;
  uint64_t switches = 0;
  uint64_t accesses = 0;
  Context scheduler;

  void run();
  void advanced() { idle_polls_ = 0; }  // something happened that pollers may be waiting for
  void start(std::unique_ptr<Operation> operation);  // under the eager policy it is done at once
  int agents_per_block() const { return threads + threads / WARPGROUP_SIZE + ENGINES; }
  uint64_t random();
  bool chance(double probability);

 private:
  uint64_t random_state_ = 0;
  uint32_t next_cluster_ = 0;
  uint32_t done_ = 0;  // blocks
  std::vector<uint32_t> order_;  // of the clusters
  int idle_polls_ = 0;

  void start_cluster(int slot);
  void start_block(int slot, uint32_t linear, const std::shared_ptr<Cluster>& cluster);
  void start_thread(Cta& cta, int t);
  void prepare_run();
  void replace(Cta& cta);
  bool grow();
  bool wake_pollers();
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

// A PTX wrapper begins: remembers where.
Fiber& enter(const void* return_address);
void maybe_yield(Fiber& fiber);  // lets others run now and then

// All lanes of the warp bring `arguments`; the last one runs `collective` for all.
void meet(Fiber& fiber, Collective collective, void* arguments, Kind kind = Kind::SHUFFLE);

// The trace of the fiber's block for its warp's first lane; null: it is not traced, or another lane is timed for it.
Trace* traced(const Fiber& fiber);

// Each runs some pending work by policy, and returns false if there is none.
bool finish_copies(Machine& m);     // cp_async.cpp
bool run_operations(Machine& m);    // bulk.cpp
bool run_products(Machine& m);      // wgmma.cpp

// Work that a thread has not waited for when it exits is a fault.
void check_copies_at_exit(Fiber& fiber);
void check_bulk_at_exit(Fiber& fiber);
void check_products_at_exit(Fiber& fiber);

void start_warpgroups(Cta& cta);    // wgmma.cpp
void start_registers(Cta& cta);     // setmaxnreg.cpp
void forget_semaphores();           // atomic.cpp
std::string describe_mbarrier(const Cta& cta, uint32_t offset);

}  // namespace emu
