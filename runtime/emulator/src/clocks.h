// Happens-before: vector clocks of agents, and a shadow of memory that remembers who touched what and when.
//
// An agent is a thread, or a piece of hardware that works on its own. Agents are numbered within a group: the blocks
// that can synchronise through shared memory, which is one block, or one cluster.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace emu {

using Clock = uint32_t;

struct VectorClock {
  std::vector<Clock> seen;  // by agent of the own group: the latest moment that lies in the past of the owner

  void reset(size_t agents) { seen.assign(agents, 0); }
  void join(const VectorClock& other);
};

// An access: by whom, when, from which place of the kernel's code.
struct Moment {
  uint32_t group = 0;
  Clock clock = 0;
  uint32_t pc = 0;
  uint16_t agent = 0;
};

// Who accesses now, and what lies in its past.
struct Actor {
  Moment now;
  const VectorClock* past;

  bool after(const Moment& then) const {
    if (then.group != now.group) return false;
    return then.agent == now.agent || past->seen[then.agent] >= then.clock;
  }
};

enum class State : uint8_t { UNINITIALISED, WRITTEN, IN_FLIGHT };

// What is known of a piece of memory.
struct Cell {
  Moment write;
  uint32_t readers = 0;  // since the last write: list in the pool, 0: none
  State state = State::UNINITIALISED;
};

enum class Conflict : uint8_t { NONE, UNINITIALISED, IN_FLIGHT, WRITE, READ };

struct Verdict {
  Conflict conflict = Conflict::NONE;
  size_t offset = 0;  // first byte of the cell in conflict
  Moment other;
};

// A shadow of a piece of memory. One cell speaks for a chunk of 16 bytes as long as it is accessed as a whole; an access
// to a part splits it into cells of 2 bytes. Neighbours within those must be written by one thread.
class Shadow {
 public:
  // All cells become `state`. Before the end as well: the memory of lists of readers is common to all shadows.
  void reset(size_t bytes, State state);
  Verdict read(const Actor& actor, size_t offset, size_t bytes);
  Verdict write(const Actor& actor, size_t offset, size_t bytes, State state);
  // Whether a read would be in order; leaves no trace.
  Verdict probe(const Actor& actor, size_t offset, size_t bytes);
  // An asynchronous write becomes a plain one of `actor`, now.
  void land(const Actor& actor, size_t offset, size_t bytes);

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

  Chunk& at(size_t index);
  void split(Chunk& chunk);
  void merge(Chunk& chunk);
  template <class Visit>
  Verdict each_cell(size_t offset, size_t bytes, Visit visit);

  std::vector<std::unique_ptr<Page>> pages_;
  State initial_ = State::UNINITIALISED;
};

}  // namespace emu
