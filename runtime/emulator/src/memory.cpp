#include "memory.h"

#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>

#include <cstdlib>

namespace emu {

namespace {

constexpr size_t SLOT_BYTES = 1 << 20;  // of one block's shared memory with its guard zones
constexpr size_t SLOT_GUARD = 256 << 10;
constexpr int MAX_SLOTS = 64;
constexpr int64_t GUARD_BYTES = 32 << 10;  // half the distance that Python leaves between two tensors

unsigned char* arena = nullptr;
uintptr_t module_begin = 0, module_end = 0;

// Whether [offset, + bytes) lies in rows of the tensor, not in the gaps that its strides leave.
bool in_view(const Buffer& buffer, uint64_t offset, size_t bytes) {
  uint64_t rest = offset;
  for (uint32_t i = 0; i < buffer.rank; ++i) {
    const uint64_t index = rest / static_cast<uint64_t>(buffer.strides[i]);
    if (index >= static_cast<uint64_t>(buffer.sizes[i])) return false;
    rest -= index * static_cast<uint64_t>(buffer.strides[i]);
  }
  return rest + bytes <= buffer.run_bytes;
}

const char* name(Access access) {
  switch (access) {
    case Access::WRITE:
      return "write";
    case Access::ASYNC_WRITE:
    case Access::COPY:
      return "asynchronous write";
    case Access::ATOMIC:
      return "atomic write";
    default:
      return "read";
  }
}

[[noreturn]] void conflict(const Fiber& fiber, const Verdict& verdict, Place place, Access access) {
  place.offset = static_cast<int64_t>(verdict.offset);
  Fault fault{"race", "", &fiber, fiber.pc, place, &verdict.other, {}};
  switch (verdict.conflict) {
    case Conflict::UNINITIALISED:
      fault.kind = "uninitialised";
      fault.text = "read of memory that nothing has written";
      fault.other = nullptr;
      break;
    case Conflict::IN_FLIGHT:
      fault.kind = "in_flight";
      fault.text = std::string(name(access)) + " while an asynchronous copy to the same place is in flight, issued by";
      break;
    case Conflict::UNFENCED:
      fault.kind = "unfenced";
      fault.text = std::string(name(access)) + " by the async proxy of what no proxy fence has shown to it, written by";
      break;
    case Conflict::BARRIER:
      fault.kind = "barrier";
      fault.text = std::string(name(access)) + " of an mbarrier, initialised by";
      break;
    case Conflict::WRITE:
      fault.text = std::string(name(access)) + " that nothing orders after the write by";
      break;
    default:
      fault.text = std::string(name(access)) + " that nothing orders after the read by";
  }
  stop(fault);
}

void judge(const Fiber& fiber, const Actor& actor, Shadow& shadow, const Place& place, Access access) {
  const auto offset = static_cast<size_t>(place.offset);
  Verdict verdict;
  switch (access) {
    case Access::READ:
      verdict = shadow.read(actor, offset, place.bytes);
      break;
    case Access::PROBE:
      verdict = shadow.probe(actor, offset, place.bytes);
      break;
    default: {
      const State state = access == Access::WRITE         ? State::WRITTEN
                          : access == Access::ASYNC_WRITE ? State::IN_FLIGHT
                          : access == Access::COPY        ? State::COPIED
                                                          : State::ADDED;
      verdict = shadow.write(actor, offset, place.bytes, state);
    }
  }
  if (verdict.conflict != Conflict::NONE) conflict(fiber, verdict, place, access);
}

// True if the address belongs to the arena of shared memory.
bool check_shared(const Fiber& fiber, const Actor& actor, const unsigned char* p, size_t bytes, Access access) {
  if (arena == nullptr || p < arena || p >= arena + MAX_SLOTS * SLOT_BYTES) return false;
  Cta* const cta = owner(fiber, p);
  if (cta == nullptr) {
    fail(fiber, "out_of_bounds", {}, "%s of the shared memory of a block outside the cluster", name(access));
  }
  const int64_t offset = p - cta->smem;
  const Place place{Place::SHARED, cta->rank, offset, bytes};
  const auto size = static_cast<int64_t>(machine.launch->smem_bytes);
  if (offset < 0 || offset + static_cast<int64_t>(bytes) > size) {
    fail(fiber, "out_of_bounds", place, "%s of %zu bytes outside the %lld bytes of the block's shared memory",
         name(access), bytes, static_cast<long long>(size));
  }
  if (cta != fiber.cta && cta->running == 0) {
    fail(fiber, "out_of_bounds", place, "%s of the shared memory of a block that has exited", name(access));
  }
  if (!actor.async_proxy && (access == Access::READ || access == Access::WRITE) && cta == fiber.cta) {
    fiber.warp->accesses.add(fiber.pc, fiber.lane, static_cast<uint32_t>(offset), static_cast<uint32_t>(bytes));
  }
  judge(fiber, actor, cta->shadow, place, access);
  return true;
}

bool check_global(const Fiber& fiber, const Actor& actor, const unsigned char* p, size_t bytes, Access access) {
  const Launch& launch = *machine.launch;
  for (uint32_t i = 0; i < launch.num_buffers; ++i) {
    const Buffer& buffer = launch.buffers[i];
    const int64_t offset = p - buffer.data;
    const auto size = static_cast<int64_t>(buffer.bytes);
    if (offset < -GUARD_BYTES || offset >= size + GUARD_BYTES) continue;
    const Place place{Place::GLOBAL, i, offset, bytes};
    const bool inside = offset >= 0 && offset + static_cast<int64_t>(bytes) <= size;
    if (!inside || !in_view(buffer, static_cast<uint64_t>(offset), bytes)) {
      fail(fiber, "out_of_bounds", place, "%s of %zu bytes outside the tensor", name(access), bytes);
    }
    if (!buffer.writable) {
      if (access != Access::READ) fail(fiber, "read_only", place, "%s of an input", name(access));
      return true;  // nobody can race with it
    }
    judge(fiber, actor, machine.global[i], place, access);
    return true;
  }
  return false;
}

}  // namespace

void check(Fiber& fiber, const void* pointer, size_t bytes, Access access) {
  check(fiber, fiber.actor(), pointer, bytes, access);
}

Cta* owner(const Fiber& fiber, const void* pointer) {
  const int64_t slot = (static_cast<const unsigned char*>(pointer) - arena) / static_cast<int64_t>(SLOT_BYTES);
  for (Cta* block : fiber.cta->cluster->blocks) {
    if (block->slot == slot) return block;
  }
  return nullptr;
}

void check(const Fiber& fiber, const Actor& actor, const void* pointer, size_t bytes, Access access) {
  const auto* const p = static_cast<const unsigned char*>(pointer);
  ++machine.accesses;
  if (check_shared(fiber, actor, p, bytes, access) || check_global(fiber, actor, p, bytes, access)) return;
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  if (access == Access::READ && address >= module_begin && address + bytes <= module_end) return;  // a constant
  fail(fiber, "wild", {}, "%s of %zu bytes at %p, which is neither shared memory, nor a tensor, nor the thread's own",
       name(access), bytes, pointer);
}

void check_registers(const Fiber& fiber, const unsigned char* p, size_t bytes, bool write) {
  for (const OwnedRegisters& owned : fiber.owned) {
    if (p + bytes <= owned.begin || p >= owned.end || (owned.readable && !write)) continue;
    fail(fiber, "registers", {}, "%s of registers that belong to an unfinished wgmma", write ? "write" : "read");
  }
}

uint32_t shared_offset(const Fiber& fiber, const void* pointer, size_t bytes, size_t alignment, const char* what) {
  const int64_t offset = static_cast<const unsigned char*>(pointer) - fiber.cta->smem;
  const auto size = static_cast<int64_t>(machine.launch->smem_bytes);
  if (offset < -static_cast<int64_t>(SLOT_GUARD) || offset >= static_cast<int64_t>(SLOT_BYTES - SLOT_GUARD)) {
    fail(fiber, "argument", {}, "%s of %p, which is no address in shared memory", what, pointer);
  }
  const Place place{Place::SHARED, 0, offset, bytes};
  if (offset < 0 || offset + static_cast<int64_t>(bytes) > size) {
    fail(fiber, "out_of_bounds", place, "%s of %zu bytes outside the %lld bytes of the block's shared memory", what,
         bytes, static_cast<long long>(size));
  }
  if (offset % static_cast<int64_t>(alignment) != 0) {
    fail(fiber, "misaligned", place, "%s at an address that is no multiple of %zu", what, alignment);
  }
  return static_cast<uint32_t>(offset);
}

unsigned char* shared_memory(int slot) {
  if (arena == nullptr) {
    // Aligned for every swizzle, as the hardware's window is.
    void* const memory = mmap(nullptr, (MAX_SLOTS + 1) * SLOT_BYTES, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) abort();
    const uintptr_t start = (reinterpret_cast<uintptr_t>(memory) + SLOT_BYTES - 1) / SLOT_BYTES * SLOT_BYTES;
    arena = reinterpret_cast<unsigned char*>(start);
  }
  if (slot >= MAX_SLOTS) abort();
  return arena + slot * SLOT_BYTES + SLOT_GUARD;
}

void set_module(const void* entry) {
  Dl_info info;
  if (dladdr(entry, &info) == 0) abort();
  module_begin = reinterpret_cast<uintptr_t>(info.dli_fbase);
  module_end = module_begin;
  dl_iterate_phdr(
      [](dl_phdr_info* module, size_t, void*) {
        for (int i = 0; i < module->dlpi_phnum; ++i) {
          const auto& segment = module->dlpi_phdr[i];
          if (module->dlpi_addr != module_begin || segment.p_type != PT_LOAD) continue;
          const uintptr_t end = module->dlpi_addr + segment.p_vaddr + segment.p_memsz;
          if (end > module_end) module_end = end;
        }
        return 0;
      },
      nullptr);
}

uint32_t code_offset(const void* return_address) {
  return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(return_address) - 1 - module_begin);
}

}  // namespace emu

// ---- what the compiler calls at each load and store (-fsanitize=thread, with this in place of its runtime)

namespace {

inline void hook(const void* pointer, size_t bytes, bool write, const void* return_address) {
  emu::Fiber* const fiber = emu::current;
  if (fiber == nullptr) return;
  const auto* const p = static_cast<const unsigned char*>(pointer);
  if (static_cast<size_t>(p - fiber->stack) < emu::STACK_BYTES) {  // registers and locals
    if (emu::Trace* const trace = emu::traced(*fiber)) trace->think(*fiber->warp, emu::code_offset(return_address));
    if (fiber->owned.empty()) return;
    fiber->pc = emu::code_offset(return_address);
    emu::check_registers(*fiber, p, bytes, write);
    return;
  }
  fiber->pc = emu::code_offset(return_address);
  emu::check(*fiber, pointer, bytes, write ? emu::Access::WRITE : emu::Access::READ);
}

}  // namespace

#define HOOK(name, bytes, write) \
  void __tsan_##name(void* pointer) { hook(pointer, bytes, write, __builtin_return_address(0)); }
#define HOOKS(bytes)                          \
  HOOK(read##bytes, bytes, false)             \
  HOOK(write##bytes, bytes, true)             \
  HOOK(unaligned_read##bytes, bytes, false)   \
  HOOK(unaligned_write##bytes, bytes, true)

extern "C" {
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_read_range(void* pointer, size_t bytes) { hook(pointer, bytes, false, __builtin_return_address(0)); }
void __tsan_write_range(void* pointer, size_t bytes) { hook(pointer, bytes, true, __builtin_return_address(0)); }
void* __tsan_memcpy(void* to, const void* from, size_t bytes) {
  hook(from, bytes, false, __builtin_return_address(0));
  hook(to, bytes, true, __builtin_return_address(0));
  return __builtin_memcpy(to, from, bytes);
}
void* __tsan_memset(void* to, int value, size_t bytes) {
  hook(to, bytes, true, __builtin_return_address(0));
  return __builtin_memset(to, value, bytes);
}
}
