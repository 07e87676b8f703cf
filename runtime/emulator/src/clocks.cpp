#include "clocks.h"

#include <algorithm>
#include <deque>

#include "wide.h"

namespace emu {

namespace {

// Half of a launch's time went into these two loops, so they use the widest registers that the processor has.
WIDE void raise(Clock* mine, const Clock* other, size_t count) {
  for (size_t i = 0; i < count; ++i) mine[i] = std::max(mine[i], other[i]);
}

WIDE void lower(Clock* mine, const Clock* other, size_t count) {
  for (size_t i = 0; i < count; ++i) mine[i] = std::min(mine[i], other[i]);
}

void raise(VectorClock::Moments& mine, const VectorClock::Moments& other) {
  if (mine.size() < other.size()) mine.resize(other.size());
  raise(mine.data(), other.data(), other.size());
}

void lower(VectorClock::Moments& mine, const VectorClock::Moments& other) {
  mine.resize(std::min(mine.size(), other.size()));
  lower(mine.data(), other.data(), mine.size());
}

}  // namespace

void VectorClock::reset(size_t agents) {
  seen.assign(agents, 0);
  for (Moments& moments : fenced) moments.clear();
  reads.clear();
  others.clear();
}

void VectorClock::join_reads(const VectorClock& other) {
  raise(reads, other.seen);
  raise(reads, other.reads);
}

void VectorClock::join(const VectorClock& other) {
  raise(seen, other.seen);
  raise(reads, other.reads);
  for (int i = 0; i < 2; ++i) raise(fenced[i], other.fenced[i]);
  for (const auto& [group, moments] : other.others) {
    auto& mine = others[group];
    if (mine == moments) continue;
    auto both = std::make_shared<Moments>(*moments);
    if (mine != nullptr) raise(*both, *mine);
    mine = both;
  }
}

void VectorClock::meet(const VectorClock& other) {
  lower(seen, other.seen);
  lower(reads, other.reads);
  for (int i = 0; i < 2; ++i) lower(fenced[i], other.fenced[i]);
  for (auto mine = others.begin(); mine != others.end();) {
    const auto found = other.others.find(mine->first);
    if (found == other.others.end()) {
      mine = others.erase(mine);
      continue;
    }
    if (found->second != mine->second) {
      auto both = std::make_shared<Moments>(*mine->second);
      lower(*both, *found->second);
      mine->second = both;
    }
    ++mine;
  }
}

void VectorClock::learn(const VectorClock& other, uint32_t from, uint32_t to) {
  VectorClock foreign;
  foreign.others = other.others;
  foreign.others.erase(to);
  if (from == to) {
    raise(seen, other.seen);
  } else if (!other.seen.empty()) {
    foreign.others[from] = std::make_shared<Moments>(other.seen);
  }
  join(foreign);
  const auto own = other.others.find(to);
  if (own != other.others.end()) raise(seen, *own->second);
}

void VectorClock::fence(Space space, uint16_t agent) {
  Moments& moments = fenced[static_cast<int>(space)];
  if (moments.empty()) moments.resize(seen.size());
  moments[agent] = seen[agent];
}

bool Actor::after_other_group(const Moment& then) const {
  const auto found = past->others.find(then.group);
  return found != past->others.end() && (*found->second)[then.agent] >= then.clock;
}

bool Actor::sees_through_fence(const Moment& then, Space space) const {
  if (!async_proxy || then.group != now.group) return true;  // between groups the writer's fence is not followed
  const VectorClock::Moments& moments = past->fenced[static_cast<int>(space)];
  return then.agent < moments.size() && moments[then.agent] >= then.clock;
}

namespace {

// Readers of a cell since its last write: a list of moments in one pool, entry 0 ending it; or, where many read, a
// table of each agent's last moment.
struct Reader {
  Moment moment;
  uint32_t next;
};

struct Table {
  uint32_t group;
  std::vector<Clock> clocks;  // by agent, 0: has not read
  std::vector<uint32_t> pcs;
};

constexpr uint32_t TABLE = 1u << 31;  // marks the index of a table among those of lists
constexpr int MAX_LIST = 8;

std::vector<Reader> pool(1);
uint32_t free_reader = 0;
std::deque<Table> tables;
std::vector<uint32_t> free_tables;

uint32_t new_reader(const Moment& moment, uint32_t next) {
  if (free_reader == 0) {
    pool.push_back({moment, next});
    return static_cast<uint32_t>(pool.size() - 1);
  }
  const uint32_t index = free_reader;
  free_reader = pool[index].next;
  pool[index] = {moment, next};
  return index;
}

uint32_t new_table(const Table& table) {
  if (free_tables.empty()) {
    tables.push_back(table);
    return static_cast<uint32_t>(tables.size() - 1) | TABLE;
  }
  const uint32_t index = free_tables.back();
  free_tables.pop_back();
  tables[index] = table;
  return index | TABLE;
}

void free_readers(uint32_t& list) {
  if ((list & TABLE) != 0) {
    free_tables.push_back(list & ~TABLE);
    list = 0;
  }
  while (list != 0) {
    const uint32_t next = pool[list].next;
    pool[list].next = free_reader;
    free_reader = list;
    list = next;
  }
}

uint32_t copy_of(uint32_t list) {
  if ((list & TABLE) != 0) return new_table(Table(tables[list & ~TABLE]));
  uint32_t copy = 0;
  for (uint32_t i = list; i != 0; i = pool[i].next) copy = new_reader(Moment(pool[i].moment), copy);
  return copy;
}

// A table of what a list holds, 0 if that speaks of several groups.
uint32_t table_of(uint32_t list, const Actor& actor) {
  Table table{actor.now.group, std::vector<Clock>(actor.past->seen.size()), {}};
  table.pcs.resize(table.clocks.size());
  for (uint32_t i = list; i != 0; i = pool[i].next) {
    const Moment& moment = pool[i].moment;
    if (moment.group != table.group || moment.atomic) return 0;
    table.clocks[moment.agent] = moment.clock;
    table.pcs[moment.agent] = moment.pc;
  }
  return new_table(table);
}

// Notes that `actor` read. A reader that lies in the past of another one need not be remembered beside it.
void add_reader(Cell& cell, const Actor& actor) {
  if ((cell.readers & TABLE) != 0) {
    Table& table = tables[cell.readers & ~TABLE];
    if (actor.now.atomic) return;  // a table cannot say so, and plain reads are what matters
    if (table.group == actor.now.group) {
      table.clocks[actor.now.agent] = actor.now.clock;
      table.pcs[actor.now.agent] = actor.now.pc;
      return;
    }
    free_readers(cell.readers);  // groups do not wait for each other's reads: keep the newest group's
  }
  int length = 0;
  for (uint32_t i = cell.readers; i != 0; i = pool[i].next) {
    if (actor.after(pool[i].moment)) {
      pool[i].moment = actor.now;
      return;
    }
    ++length;
  }
  cell.readers = new_reader(actor.now, cell.readers);
  if (length < MAX_LIST) return;
  const uint32_t table = table_of(cell.readers, actor);
  if (table == 0) return;
  free_readers(cell.readers);
  cell.readers = table;
}

// A reader whose read is not over for `actor`, if there is one.
bool unfinished_reader(const Cell& cell, const Actor& actor, Moment& found) {
  if ((cell.readers & TABLE) == 0) {
    for (uint32_t r = cell.readers; r != 0; r = pool[r].next) {
      found = pool[r].moment;
      if (!actor.after_read(found) && !(found.atomic && actor.now.atomic)) return true;
    }
    return false;
  }
  const Table& table = tables[cell.readers & ~TABLE];
  for (size_t agent = 0; agent < table.clocks.size(); ++agent) {
    found = {table.group, table.clocks[agent], table.pcs[agent], static_cast<uint16_t>(agent), false};
    if (found.clock != 0 && !actor.after_read(found)) return true;
  }
  return false;
}

}  // namespace

Conflict Shadow::read_conflict(const Cell& cell, const Actor& actor) const {
  if (cell.state == State::UNINITIALISED) return Conflict::UNINITIALISED;
  if (cell.state == State::IN_FLIGHT) return Conflict::IN_FLIGHT;
  if (cell.state == State::BARRIER) return Conflict::BARRIER;
  if (cell.write.clock == 0) return Conflict::NONE;  // by the host
  if (actor.now.atomic && cell.state == State::ADDED) return Conflict::NONE;
  if (!actor.after(cell.write)) return Conflict::WRITE;
  if (cell.state == State::WRITTEN && !actor.sees_through_fence(cell.write, space_)) return Conflict::UNFENCED;
  return Conflict::NONE;
}

void Shadow::reset(size_t bytes, State state) {
  for (const auto& page : pages_) {
    if (page == nullptr) continue;
    for (Chunk& chunk : page->chunks) merge(chunk), free_readers(chunk.whole.readers);
  }
  pages_.clear();
  pages_.resize((bytes + CHUNK_BYTES * CHUNKS_PER_PAGE - 1) / (CHUNK_BYTES * CHUNKS_PER_PAGE));
  initial_ = state;
}

Shadow::Chunk& Shadow::at(size_t index) {
  auto& page = pages_[index / CHUNKS_PER_PAGE];
  if (page == nullptr) {
    page = std::make_unique<Page>();
    for (Chunk& chunk : page->chunks) chunk.whole.state = initial_;
  }
  return page->chunks[index % CHUNKS_PER_PAGE];
}

void Shadow::split(Chunk& chunk) {
  chunk.parts = std::make_unique<Cell[]>(CHUNK_BYTES / CELL_BYTES);
  for (size_t i = 0; i < CHUNK_BYTES / CELL_BYTES; ++i) {
    chunk.parts[i] = chunk.whole;
    chunk.parts[i].readers = copy_of(chunk.whole.readers);
  }
  free_readers(chunk.whole.readers);
}

// Forgets the parts: the whole chunk is about to be overwritten.
void Shadow::merge(Chunk& chunk) {
  if (chunk.parts == nullptr) return;
  for (size_t i = 0; i < CHUNK_BYTES / CELL_BYTES; ++i) free_readers(chunk.parts[i].readers);
  chunk.parts.reset();
}

// Calls visit(cell) until one returns a conflict.
template <class Visit>
Verdict Shadow::each_cell(size_t offset, size_t bytes, Visit visit) {
  for (size_t at_byte = offset; at_byte < offset + bytes;) {
    Chunk& chunk = at(at_byte / CHUNK_BYTES);
    const size_t start = at_byte % CHUNK_BYTES, end = std::min(CHUNK_BYTES, start + offset + bytes - at_byte);
    const size_t base = at_byte - start;
    at_byte = base + end;
    const bool whole = start == 0 && end == CHUNK_BYTES;
    if (chunk.parts == nullptr && whole) {
      const Conflict conflict = visit(chunk.whole);
      if (conflict != Conflict::NONE) return {conflict, base, chunk.whole.write};
      continue;
    }
    if (chunk.parts == nullptr) split(chunk);
    for (size_t i = start / CELL_BYTES; i <= (end - 1) / CELL_BYTES; ++i) {
      const Conflict conflict = visit(chunk.parts[i]);
      if (conflict != Conflict::NONE) return {conflict, base + i * CELL_BYTES, chunk.parts[i].write};
    }
  }
  return {};
}

Verdict Shadow::read(const Actor& actor, size_t offset, size_t bytes) {
  return each_cell(offset, bytes, [&](Cell& cell) {
    const Conflict conflict = read_conflict(cell, actor);
    if (conflict == Conflict::NONE) add_reader(cell, actor);
    return conflict;
  });
}

Verdict Shadow::probe(const Actor& actor, size_t offset, size_t bytes) {
  return each_cell(offset, bytes, [&](Cell& cell) { return read_conflict(cell, actor); });
}

Verdict Shadow::write(const Actor& actor, size_t offset, size_t bytes, State state) {
  Moment reader;
  Verdict verdict = each_cell(offset, bytes, [&](Cell& cell) {
    if (cell.state == State::IN_FLIGHT) return Conflict::IN_FLIGHT;
    if (cell.state == State::BARRIER) return Conflict::BARRIER;
    const bool both_atomic = state == State::ADDED && cell.state == State::ADDED;
    if (cell.write.clock != 0 && !both_atomic && !actor.after(cell.write)) return Conflict::WRITE;
    if (unfinished_reader(cell, actor, reader)) return Conflict::READ;
    free_readers(cell.readers);
    cell.write = actor.now;
    cell.state = state;
    return Conflict::NONE;
  });
  if (verdict.conflict == Conflict::READ) verdict.other = reader;
  for (size_t i = (offset + CHUNK_BYTES - 1) / CHUNK_BYTES; i < (offset + bytes) / CHUNK_BYTES; ++i) {
    Chunk& chunk = at(i);  // written as a whole: one cell speaks for it again
    if (verdict.conflict != Conflict::NONE || chunk.parts == nullptr) continue;
    merge(chunk);
    chunk.whole.write = actor.now;
    chunk.whole.state = state;
  }
  return verdict;
}

void Shadow::land(uint16_t agent, Clock clock, size_t offset, size_t bytes, State state) {
  each_cell(offset, bytes, [&](Cell& cell) {
    cell.write.agent = agent;
    cell.write.clock = clock;  // the place in the code stays that of the issue
    cell.state = state;
    return Conflict::NONE;
  });
}

}  // namespace emu
