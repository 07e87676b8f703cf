// TMA: cp.async.bulk (PTX ISA 9.7.9.25.4) and tensor copies (9.7.9.25.5). Loads report to an mbarrier,
// stores and sums belong to groups of the issuing thread. Each copy reads and writes at moments of its own.
#include <algorithm>
#include <cstring>

#include "mbarrier.h"
#include "memory.h"
#include "tensor_map.h"

namespace emu {

namespace {

constexpr uint32_t CHUNK = 16;
constexpr uint32_t TENSOR_ALIGNMENT = 128;

uint32_t swizzled(uint32_t offset, uint32_t width) {
  const uint32_t chunks = width / CHUNK;
  return chunks == 0 ? offset : offset ^ (offset >> 7 & (chunks - 1)) << 4;
}

// Rows of a box, or of a plain range, as pieces of contiguous elements in both memories.
struct Box {
  EncodedMap map{};
  int coords[MAX_RANK] = {};
  uint32_t row_bytes = 0, rows = 1;

  uint32_t bytes() const { return row_bytes * rows; }

  // Address of 16 bytes of a row, and which of its elements exist: [first, last) in bytes.
  unsigned char* chunk(uint32_t row, uint32_t byte, uint32_t& first, uint32_t& last) const {
    int64_t address = static_cast<int64_t>(map.data);
    bool inside = true;
    for (uint32_t axis = 1; axis < map.rank; ++axis) {
      const int64_t position = coords[axis] + static_cast<int64_t>(row % map.box[axis]);
      row /= map.box[axis];
      inside = inside && position >= 0 && position < static_cast<int64_t>(map.dims[axis]);
      address += position * static_cast<int64_t>(map.strides[axis - 1]);
    }
    const int64_t size = map.element_bytes, start = coords[0] * size + byte;
    const auto end = static_cast<int64_t>(map.dims[0]) * size;
    first = inside ? static_cast<uint32_t>(std::clamp<int64_t>(-start, 0, CHUNK)) : 0;
    last = inside ? static_cast<uint32_t>(std::clamp<int64_t>(end - start, first, CHUNK)) : 0;
    return reinterpret_cast<unsigned char*>(address + start);
  }
};

Box plain_range(const void* gmem, uint32_t bytes) {
  Box box;
  box.map = {TENSOR_MAP_MAGIC, 1, 1, 1, 0, {bytes}, reinterpret_cast<uint64_t>(gmem), {bytes}, {}};
  box.row_bytes = bytes;
  return box;
}

Box tensor_box(const Fiber& fiber, const void* map, int rank, const int* coords) {
  Box box;
  memcpy(&box.map, map, sizeof box.map);
  if (box.map.magic != TENSOR_MAP_MAGIC) fail(fiber, "argument", {}, "a tensor copy through what is no tensor map");
  if (box.map.rank != static_cast<uint32_t>(rank)) {
    fail(fiber, "argument", {}, "a copy of %d dimensions through a tensor map of %u", rank, box.map.rank);
  }
  box.row_bytes = box.map.box[0] * box.map.element_bytes;
  for (int axis = 1; axis < rank; ++axis) box.rows *= box.map.box[axis];
  memcpy(box.coords, coords, static_cast<size_t>(rank) * sizeof *coords);
  return box;
}

// Unlike a load. A negative start trapped on an H200; past the end nothing was written.
void refuse_negative_start(const Fiber& fiber, const EncodedMap& map, const int* coords, const char* what) {
  for (uint32_t axis = 0; axis < map.rank; ++axis) {
    if (coords[axis] < 0) {
      fail(fiber, "argument", {}, "a tensor %s at %d in dimension %u: a negative coordinate traps on Hopper", what,
           coords[axis], axis);
    }
  }
}

// Faults of an engine name the place of the issue, not where the thread is by then.
class At {
 public:
  At(Fiber& fiber, uint32_t pc) : fiber_(fiber), before_(fiber.pc) { fiber.pc = pc; }
  ~At() { fiber_.pc = before_; }

 private:
  Fiber& fiber_;
  uint32_t before_;
};

struct Load : Operation {
  Fiber& issuer;
  Cta& into;
  Box box;
  uint32_t offset, barrier;
  uint16_t engine;
  Clock moment;
  VectorClock issued;
  uint32_t pc;
  double time = 0;  // when it has landed, traced
  std::vector<uint32_t> rows_left;

  Load(Fiber& fiber, Cta& cta, const Box& what, uint32_t smem_offset, uint32_t barrier_offset)
      : issuer(fiber), into(cta), box(what), offset(smem_offset), barrier(barrier_offset), issued(fiber.clock),
        pc(fiber.pc) {
    engine = copy_target(fiber, cta, barrier).engine;
    moment = cta.tick(engine);
    check(fiber, actor(), cta.smem + offset, box.bytes(), Access::ASYNC_WRITE);
    memset(cta.smem + offset, 0xff, box.bytes());
    if (machine.trace.follows(*fiber.cta)) time = machine.trace.copy(*fiber.warp, pc, box.bytes());
    for (uint32_t row = 0; row < box.rows; ++row) rows_left.push_back(row);
    for (size_t i = rows_left.size(); i > 1; --i) std::swap(rows_left[i - 1], rows_left[machine.random() % i]);
  }

  Actor actor() const { return {{into.cluster->group, moment, pc, engine, false}, &issued, true}; }

  const Cta* target() const override { return &into; }

  bool step() override {
    const At at(issuer, pc);
    size_t count = rows_left.size();
    if (machine.policy == Policy::RANDOM) count = 1 + machine.random() % count;
    for (size_t i = 0; i < count; ++i) {
      land(rows_left.back());
      rows_left.pop_back();
    }
    report_bytes(into, barrier, static_cast<uint32_t>(count) * box.row_bytes, issued, moment, time);
    return rows_left.empty();
  }

  void land(uint32_t row) {
    for (uint32_t byte = 0; byte < box.row_bytes; byte += CHUNK) {
      uint32_t first, last;
      const unsigned char* const source = box.chunk(row, byte, first, last);
      const uint32_t place = swizzled(offset + row * box.row_bytes + byte, box.map.swizzle_bytes);
      unsigned char* const to = into.smem + place;
      memset(to, 0, CHUNK);
      if (last > first) {
        check(issuer, actor(), source + first, last - first, Access::READ);
        memcpy(to + first, source + first, last - first);
      }
      into.shadow.land(engine, moment, place, CHUNK, State::COPIED);
    }
  }
};

BulkStores::Group& group_of(Fiber& fiber, size_t index) { return fiber.bulk.groups[index]; }

bool satisfied(const Fiber& fiber, size_t pending, bool reads_only) {
  const auto& groups = fiber.bulk.groups;
  for (size_t i = 0; i + 1 + pending < groups.size(); ++i) {
    if (groups[i].reading > 0 || (!reads_only && groups[i].writing > 0)) return false;
  }
  return true;
}

struct Store : Operation {
  Fiber& issuer;
  Box box;
  uint32_t offset;
  bool adds;
  size_t group;
  VectorClock issued;
  uint32_t pc;
  std::vector<unsigned char> data;

  Store(Fiber& fiber, const Box& what, uint32_t smem_offset, bool add)
      : issuer(fiber), box(what), offset(smem_offset), adds(add), group(fiber.bulk.groups.size() - 1),
        issued(fiber.clock), pc(fiber.pc) {
    if (fiber.bulk.reader == 0) {
      fiber.bulk.reader = fiber.cta->new_engine();
      fiber.bulk.writer = fiber.cta->new_engine();
    }
    ++group_of(fiber, group).issued;
    ++group_of(fiber, group).reading;
    ++group_of(fiber, group).writing;
  }

  Actor actor(uint16_t agent) const {
    return {{issuer.cta->cluster->group, static_cast<Clock>(group + 1), pc, agent, false}, &issued, true};
  }

  bool step() override {
    const At at(issuer, pc);
    const bool reads = data.empty();
    reads ? read() : write();
    BulkStores::Group& mine = group_of(issuer, group);
    --(reads ? mine.reading : mine.writing);
    const bool reads_only = issuer.waits_on != 0;
    if (issuer.wait == Wait::BULK && satisfied(issuer, static_cast<size_t>(issuer.wait_for), reads_only)) issuer.wake();
    return !reads;
  }

  void read() {
    data.resize(box.bytes());
    for (uint32_t byte = 0; byte < box.bytes(); byte += CHUNK) {
      uint32_t first, last;
      box.chunk(byte / box.row_bytes, byte % box.row_bytes, first, last);
      if (last == first) continue;  // past the end of the tensor: it goes nowhere, and may be anything
      const unsigned char* const from = issuer.cta->smem + swizzled(offset + byte, box.map.swizzle_bytes);
      check(issuer, actor(issuer.bulk.reader), from, CHUNK, Access::READ);
      memcpy(&data[byte], from, CHUNK);
    }
  }

  void write() {
    for (uint32_t row = 0; row < box.rows; ++row) {
      for (uint32_t byte = 0; byte < box.row_bytes; byte += CHUNK) {
        uint32_t first, last;
        unsigned char* const to = box.chunk(row, byte, first, last);
        if (last == first) continue;
        const unsigned char* const from = &data[row * box.row_bytes + byte];
        check(issuer, actor(issuer.bulk.writer), to + first, last - first, adds ? Access::ATOMIC : Access::COPY);
        if (!adds) {
          memcpy(to + first, from + first, last - first);
          continue;
        }
        for (uint32_t i = first; i < last; i += sizeof(float)) {
          float sum, x;
          memcpy(&sum, to + i, sizeof sum);
          memcpy(&x, from + i, sizeof x);
          sum += x;
          memcpy(to + i, &sum, sizeof sum);
        }
      }
    }
  }
};

void check_range(const Fiber& fiber, const void* gmem, uint32_t bytes) {
  if (bytes == 0 || bytes % CHUNK != 0) fail(fiber, "argument", {}, "a bulk copy of %u bytes", bytes);
  if (reinterpret_cast<uintptr_t>(gmem) % CHUNK != 0) fail(fiber, "misaligned", {}, "a bulk copy at %p", gmem);
}

void store(Fiber& fiber, const Box& box, const void* smem, uint32_t alignment, bool adds) {
  maybe_yield(fiber);
  if (adds && box.map.is_f32 == 0) fail(fiber, "argument", {}, "sums of other elements than f32 are not modelled");
  const uint32_t offset = shared_offset(fiber, smem, box.bytes(), alignment, "a bulk store");
  machine.start(std::make_unique<Store>(fiber, box, offset, adds));
  fiber.release();
}

}  // namespace

bool run_operations(Machine& m) {
  if (m.operations.empty()) return false;
  auto& chosen = m.operations[m.random() % m.operations.size()];
  if (chosen->step()) {
    std::swap(chosen, m.operations.back());
    m.operations.pop_back();
  }
  return true;
}

void check_bulk_at_exit(Fiber& fiber) {
  for (size_t i = fiber.bulk.read_waited; i < fiber.bulk.groups.size(); ++i) {
    if (fiber.bulk.groups[i].issued == 0) continue;
    fail(fiber, "unwaited", {}, "the thread exits with bulk stores that it has not waited for");
  }
}

void bulk_load(void* smem, const void* gmem, uint32_t bytes, uint64_t* barrier) {
  Fiber& fiber = enter(__builtin_return_address(0));
  maybe_yield(fiber);
  check_range(fiber, gmem, bytes);
  const uint32_t offset = shared_offset(fiber, smem, bytes, CHUNK, "a bulk load");
  const uint32_t barrier_offset = shared_offset(fiber, barrier, 8, 8, "a bulk load's mbarrier");
  machine.start(std::make_unique<Load>(fiber, *fiber.cta, plain_range(gmem, bytes), offset, barrier_offset));
  fiber.release();
}

void tma_load(void* smem, const void* map, uint64_t* barrier, int rank, const int* coords, uint32_t blocks) {
  Fiber& fiber = enter(__builtin_return_address(0));
  maybe_yield(fiber);
  const Box box = tensor_box(fiber, map, rank, coords);
  const uint32_t offset = shared_offset(fiber, smem, box.bytes(), TENSOR_ALIGNMENT, "a tensor load");
  const uint32_t barrier_offset = shared_offset(fiber, barrier, 8, 8, "a tensor load's mbarrier");
  if (blocks >> machine.launch->cluster != 0) {
    fail(fiber, "argument", {}, "multicast to blocks 0x%x of a cluster of %u", blocks, machine.launch->cluster);
  }
  for (Cta* block : fiber.cta->cluster->blocks) {
    const bool chosen = blocks == 0 ? block == fiber.cta : (blocks >> block->rank & 1) != 0;
    if (chosen) machine.start(std::make_unique<Load>(fiber, *block, box, offset, barrier_offset));
  }
  fiber.release();
}

void tma_store(const void* map, const void* smem, int rank, const int* coords, bool adds) {
  Fiber& fiber = enter(__builtin_return_address(0));
  const Box box = tensor_box(fiber, map, rank, coords);
  refuse_negative_start(fiber, box.map, coords, adds ? "sum" : "store");
  store(fiber, box, smem, TENSOR_ALIGNMENT, adds);
}

void bulk_store(void* gmem, const void* smem, uint32_t bytes) {
  Fiber& fiber = enter(__builtin_return_address(0));
  check_range(fiber, gmem, bytes);
  store(fiber, plain_range(gmem, bytes), smem, CHUNK, false);
}

void bulk_reduce_add_f32(float* gmem, const float* smem, uint32_t bytes) {
  Fiber& fiber = enter(__builtin_return_address(0));
  check_range(fiber, gmem, bytes);
  Box box = plain_range(gmem, bytes);
  box.map.is_f32 = 1;
  store(fiber, box, smem, CHUNK, true);
}

void prefetch_tensormap(const void* map) {
  const Fiber& fiber = enter(__builtin_return_address(0));
  uint32_t magic;
  memcpy(&magic, map, sizeof magic);
  if (magic != TENSOR_MAP_MAGIC) fail(fiber, "argument", {}, "prefetch.tensormap of what is no tensor map");
}

void bulk_commit() {
  Fiber& fiber = enter(__builtin_return_address(0));
  fiber.bulk.groups.emplace_back();
}

void bulk_wait(int pending, bool reads_only) {
  Fiber& fiber = enter(__builtin_return_address(0));
  maybe_yield(fiber);
  if (!satisfied(fiber, static_cast<size_t>(pending), reads_only)) {
    fiber.waits_on = reads_only ? 1 : 0;
    fiber.block(Wait::BULK, pending);
  }
  BulkStores& bulk = fiber.bulk;
  if (bulk.groups.size() < static_cast<size_t>(pending) + 1) return;
  const size_t covered = bulk.groups.size() - 1 - static_cast<size_t>(pending);
  bulk.read_waited = std::max(bulk.read_waited, covered);
  if (bulk.reader == 0) return;
  fiber.clock.seen[bulk.reader] = std::max(fiber.clock.seen[bulk.reader], static_cast<Clock>(covered));
  if (!reads_only) {
    fiber.clock.seen[bulk.writer] = std::max(fiber.clock.seen[bulk.writer], static_cast<Clock>(covered));
  }
}

}  // namespace emu
