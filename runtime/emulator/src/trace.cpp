#include "trace.h"

#include <algorithm>

#include "machine.h"

namespace emu {

void Trace::start(const Costs& costs, int64_t block, uint32_t warps) {
  *this = {};
  costs_ = costs;
  block_ = block;
  warps_ = warps;
}

bool Trace::follows(const Cta& cta) const { return block_ == static_cast<int64_t>(cta.linear); }

double* Trace::unit(const Warp& warp, Kind kind) {
  const int quarter = warp.number % QUARTERS;
  return kind == Kind::EXP ? &exp_free_[quarter] : kind == Kind::TENSOR ? &tensor_free_[quarter] : nullptr;
}

void Trace::settle(Warp& warp) {
  if (warp.thought == 0) return;
  const double end = warp.time + warp.thought;
  spans_.push_back({static_cast<uint32_t>(warp.number), Kind::ALU, warp.thought_pc, warp.time, end});
  warp.time = end;
  warp.thought = 0;
}

void Trace::think(Warp& warp, uint32_t pc) {
  if (warp.thought_pc != pc) settle(warp);
  warp.thought_pc = pc;
  warp.thought += costs_.alu;
}

void Trace::work(Warp& warp, Kind kind, uint32_t pc, double clocks) {
  settle(warp);
  double* const free = unit(warp, kind);
  const double begin = free == nullptr ? warp.time : std::max(warp.time, *free);
  warp.time = begin + clocks;
  if (free != nullptr) *free = warp.time;
  spans_.push_back({static_cast<uint32_t>(warp.number), kind, pc, begin, warp.time});
}

void Trace::wait_until(Warp& warp, uint32_t pc, double time) {
  settle(warp);
  if (time <= warp.time) return;
  spans_.push_back({static_cast<uint32_t>(warp.number), Kind::WAIT, pc, warp.time, time});
  warp.time = time;
}

double Trace::copy(Warp& warp, uint32_t pc, uint32_t bytes) {
  work(warp, Kind::COPY, pc, costs_.issue);
  memory_free_ = std::max(memory_free_, warp.time) + bytes / costs_.copy_bytes_per_clock;
  const double landed = memory_free_ + costs_.copy_latency;
  spans_.push_back({warps_, Kind::COPY, pc, warp.time, landed});
  return landed;
}

double Trace::product(double issued, uint32_t pc, double flop) {
  const double begin = std::max(issued, wgmma_free_);
  wgmma_free_ = begin + flop / costs_.wgmma_flop_per_clock;
  spans_.push_back({warps_ + 1, Kind::TENSOR, pc, begin, wgmma_free_});
  return wgmma_free_;
}

}  // namespace emu
