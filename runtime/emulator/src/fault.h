// The first fault of a run ends it. It is handed to Python as JSON, which knows lines, buffers and stages by name.
#pragma once
#include <string>
#include <vector>

#include "machine.h"

namespace emu {

struct Place {
  enum Space { NOWHERE, SHARED, GLOBAL } space = NOWHERE;
  uint32_t buffer = 0;  // GLOBAL: index in the launch
  int64_t offset = 0;   // bytes from the start of shared memory or of the buffer
  size_t bytes = 0;
};

struct Waiters {
  int count;
  uint32_t block;
  int first_thread;
  uint32_t pc;
  std::string what;
};

struct Fault {
  std::string kind, text;
  const Fiber* fiber = nullptr;
  uint32_t pc = 0;
  Place place;
  const Moment* other = nullptr;
  std::vector<Waiters> waiters;
};

// Thrown on the scheduler's stack; a fiber that faults is abandoned.
struct Stop {};

[[noreturn]] void stop(const Fault& fault);

// A fault of `fiber` in what it does now. `format` as in printf.
[[noreturn]] void fail(const Fiber& fiber, const char* kind, const Place& place, const char* format, ...)
    __attribute__((format(printf, 4, 5)));

extern std::string report;  // JSON of the first fault, empty: none

}  // namespace emu
