// Where an address lies, and the check of each access there.
#pragma once
#include "fault.h"
#include "machine.h"

namespace emu {

enum class Access : uint8_t { READ, PROBE, WRITE, ASYNC_WRITE, COPY, ATOMIC };

// Checks an access of `fiber` to shared or device memory: inside, allowed, initialised, ordered. PROBE: a read made by
// another agent whose value this one receives.
void check(Fiber& fiber, const void* pointer, size_t bytes, Access access);

// The same of an engine, whose fault is reported as the issuing fiber's.
void check(const Fiber& fiber, const Actor& actor, const void* pointer, size_t bytes, Access access);

// The block of the fiber's cluster whose shared memory holds the address; null: none.
Cta* owner(const Fiber& fiber, const void* pointer);

// Registers that an unfinished wgmma owns are not the thread's to touch.
void check_registers(const Fiber& fiber, const unsigned char* p, size_t bytes, bool write);

// Offset in the fiber's own shared memory; a fault if [pointer, + bytes) does not lie in it or is misaligned.
uint32_t shared_offset(const Fiber& fiber, const void* pointer, size_t bytes, size_t alignment, const char* what);

// Shared memory of the block in `slot`, between guard zones.
unsigned char* shared_memory(int slot);

// Addresses of the kernel's code become offsets in its file.
void set_module(const void* entry);
uint32_t code_offset(const void* return_address);

}  // namespace emu
