// What Python calls, and the values that the CUDA language gives a thread.
#include <cstdio>
#include <cstring>

#include "fault.h"
#include "memory.h"

namespace emu {

Index3 thread_index() { return current->index; }
Index3 block_index() { return current->cta->index; }
Index3 block_size() { return {machine.launch->block[0], machine.launch->block[1], machine.launch->block[2]}; }
Index3 grid_size() { return {machine.launch->grid[0], machine.launch->grid[1], machine.launch->grid[2]}; }

unsigned char* dyn_smem() { return current->cta->smem; }

uint32_t smem_addr(const void* pointer) {
  const Fiber& fiber = enter(__builtin_return_address(0));
  return shared_offset(fiber, pointer, 0, 1, "cvta.to.shared") + SMEM_WINDOW;
}

namespace {

std::string statistics() {
  std::string json = "{\"switches\": " + std::to_string(machine.switches) +
                     ", \"accesses\": " + std::to_string(machine.accesses) + ", \"banks\": [";
  bool first = true;
  for (const auto& [pc, site] : machine.banks) {
    char row[160];
    snprintf(row, sizeof row, "%s[%u, %llu, %llu, %llu]", first ? "" : ", ", pc,
             static_cast<unsigned long long>(site.instructions), static_cast<unsigned long long>(site.wavefronts),
             static_cast<unsigned long long>(site.ideal));
    json += row;
    first = false;
  }
  json += "], \"trace\": [";
  for (size_t i = 0; i < machine.trace.spans().size(); ++i) {
    const Span& span = machine.trace.spans()[i];
    char row[160];
    snprintf(row, sizeof row, "%s[%u, %u, %u, %.1f, %.1f]", i == 0 ? "" : ", ", span.row,
             static_cast<unsigned>(span.kind), span.pc, span.begin, span.end);
    json += row;
  }
  return json + "]}";
}

}  // namespace

}  // namespace emu

// Runs a launch. 0: `answer` holds statistics, 1: a fault (both JSON). The text lives until the next call.
extern "C" int emu_run(const emu::Launch* launch, const char** answer) {
  using namespace emu;
  static std::string text;
  report.clear();
  current = nullptr;
  on_scheduler_stack = true;
  machine.launch = launch;
  set_module(reinterpret_cast<const void*>(launch->entry));
  for (Shadow& shadow : machine.global) shadow.reset(0, State::UNINITIALISED);
  machine.global.clear();
  for (uint32_t i = 0; i < launch->num_buffers; ++i) {
    const Buffer& buffer = launch->buffers[i];
    const State state = buffer.initialised ? State::WRITTEN : State::UNINITIALISED;
    machine.global.emplace_back(Space::GLOBAL).reset(buffer.bytes, state);
  }
  try {
    machine.run();
  } catch (const Stop&) {
  }
  text = report.empty() ? statistics() : report;
  *answer = text.c_str();
  return report.empty() ? 0 : 1;
}

extern "C" unsigned long emu_launch_bytes() { return sizeof(emu::Launch); }
