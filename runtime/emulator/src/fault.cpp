#include "fault.h"

#include <cstdarg>
#include <cstdio>

namespace emu {

std::string report;

namespace {

std::string quoted(const std::string& text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    result += c;
  }
  return result + "\"";
}

std::string field(const char* name, int64_t value) {
  return std::string(", \"") + name + "\": " + std::to_string(value);
}

// An agent in words: a thread, a warpgroup's wgmma, or copies.
std::string culprit(const Moment& moment) {
  const int per_block = machine.agents_per_block(), local = moment.agent % per_block;
  const uint32_t block = moment.group * machine.launch->cluster + static_cast<uint32_t>(moment.agent / per_block);
  const int thread = local < machine.threads ? local : -1, warpgroup = local - machine.threads;
  const bool product = thread < 0 && warpgroup < machine.threads / WARPGROUP_SIZE;
  return field("other_block", block) + field("other_thread", thread) + ", \"other_agent\": " +
         quoted(product ? "the wgmma of warpgroup " + std::to_string(warpgroup) : "an asynchronous copy");
}

std::string described(const Fault& fault) {
  std::string json = "{\"kind\": " + quoted(fault.kind) + ", \"text\": " + quoted(fault.text) + field("pc", fault.pc);
  if (fault.fiber != nullptr) json += field("block", fault.fiber->cta->linear) + field("thread", fault.fiber->thread);
  if (fault.place.space != Place::NOWHERE) {
    json += std::string(", \"space\": ") + (fault.place.space == Place::SHARED ? "\"shared\"" : "\"global\"");
    json += field("buffer", fault.place.buffer) + field("offset", fault.place.offset);
    json += field("bytes", static_cast<int64_t>(fault.place.bytes));
  }
  if (fault.other != nullptr) {
    json += culprit(*fault.other) + field("other_pc", fault.other->pc);
  }
  json += ", \"waiters\": [";
  for (size_t i = 0; i < fault.waiters.size(); ++i) {
    const Waiters& w = fault.waiters[i];
    json += std::string(i == 0 ? "{" : ", {") + "\"what\": " + quoted(w.what) + field("count", w.count);
    json += field("block", w.block) + field("thread", w.first_thread) + field("pc", w.pc) + "}";
  }
  return json + "]}";
}

}  // namespace

void stop(const Fault& fault) {
  if (report.empty()) report = described(fault);
  if (on_scheduler_stack) throw Stop{};
  return_to_scheduler(*current);
  __builtin_unreachable();
}

void fail(const Fiber& fiber, const char* kind, const Place& place, const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  stop({kind, text, &fiber, fiber.pc, place, nullptr, {}});
}

}  // namespace emu
