// Happens-before: vector clocks of agents, and a shadow of memory that remembers who touched what and when.
//
// An agent is a thread, or a piece of hardware that works on its own. Agents are numbered within a group: the blocks
// that can synchronise through shared memory, which is one block, or one cluster.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

namespace emu {

using Clock = uint32_t;

enum class Space : uint8_t { SHARED, GLOBAL };

struct VectorClock {
  using Moments = std::vector<Clock>;  // by agent

  Moments seen;        // of the own group: the latest moment that lies in the past of the owner
  Moments fenced[2];   // by Space: the part of it that a proxy fence has shown to the async proxy; empty: nothing
  Moments reads;       // moments of others whose reads are over, though what they wrote need not be visible
  // Of other groups, learnt through semaphores in device memory.
  std::map<uint32_t, std::shared_ptr<const Moments>> others;

  void reset(size_t agents);
  void join(const VectorClock& other);
  void join_reads(const VectorClock& other);
  void meet(const VectorClock& other);  // what both have seen
  // As join, of a clock that belongs to group `from` into one that belongs to group `to`.
  void learn(const VectorClock& other, uint32_t from, uint32_t to);
  void fence(Space space, uint16_t agent);  // what `agent` itself wrote so far
};

// An access: by whom, when, from which place of the kernel's code.
struct Moment {
  uint32_t group = 0;
  Clock clock = 0;
  uint32_t pc = 0;
  uint16_t agent = 0;
  bool atomic = false;  // needs no order with other atomics
};

// Who accesses now, and what lies in its past.
struct Actor {
  Moment now;
  const VectorClock* past;
  bool async_proxy = false;  // reads what plain stores wrote only after a proxy fence

  bool after(const Moment& then) const {
    if (then.group != now.group) return after_other_group(then);
    return then.agent == now.agent || past->seen[then.agent] >= then.clock;
  }
  // Whether a read then is over: enough to overwrite what it read.
  bool after_read(const Moment& then) const {
    return after(then) || (then.group == now.group && then.agent < past->reads.size() &&
                           past->reads[then.agent] >= then.clock);
  }
  bool after_other_group(const Moment& then) const;
  bool sees_through_fence(const Moment& then, Space space) const;
};

// WRITTEN by plain stores, COPIED by the async proxy, ADDED to by atomics, a BARRIER object.
enum class State : uint8_t { UNINITIALISED, WRITTEN, COPIED, ADDED, IN_FLIGHT, BARRIER };

// What is known of a piece of memory.
struct Cell {
  Moment write;
  uint32_t readers = 0;  // since the last write: list in the pool, 0: none
  State state = State::UNINITIALISED;
};

enum class Conflict : uint8_t { NONE, UNINITIALISED, IN_FLIGHT, WRITE, READ, UNFENCED, BARRIER };

struct Verdict {
  Conflict conflict = Conflict::NONE;
  size_t offset = 0;  // first byte of the cell in conflict
  Moment other;
};

// A shadow of a piece of memory. One cell speaks for a chunk of 16 bytes as long as it is accessed as a whole; an
// access to a part splits it into cells of 2 bytes. Neighbours within those must be written by one thread.
class Shadow {
 public:
  explicit Shadow(Space space = Space::SHARED) : space_(space) {}

  // All cells become `state`. Before the end as well: the memory of lists of readers is common to all shadows.
  void reset(size_t bytes, State state);
  Verdict read(const Actor& actor, size_t offset, size_t bytes);
  Verdict write(const Actor& actor, size_t offset, size_t bytes, State state);
  // Whether a read would be in order; leaves no trace.
  Verdict probe(const Actor& actor, size_t offset, size_t bytes);
  // An asynchronous write has arrived: what it wrote becomes `state`, at `clock` of `agent`.
  void land(uint16_t agent, Clock clock, size_t offset, size_t bytes, State state);

 private:
  static constexpr size_t CELL_BYTES = 2;
  static constexpr size_t CHUNK_BYTES = 16;
  static constexpr size_t CHUNKS_PER_PAGE = 64;
  struct Chunk {
    Cell whole;
    std::unique_ptr<Cell[]> parts;
  };
  struct Page {
    Chunk chunks[CHUNKS_PER_PAGE];
  };

  Conflict read_conflict(const Cell& cell, const Actor& actor) const;
  Chunk& at(size_t index);
  void split(Chunk& chunk);
  void merge(Chunk& chunk);
  template <class Visit>
  Verdict each_cell(size_t offset, size_t bytes, Visit visit);

  std::vector<std::unique_ptr<Page>> pages_;
  State initial_ = State::UNINITIALISED;
  Space space_;
};

}  // namespace emu
