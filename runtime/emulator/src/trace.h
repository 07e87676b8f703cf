// A timeline of one block: each timed event moves its warp's clock, by costs that Python takes from the target.
#pragma once
#include <cstdint>
#include <vector>

namespace emu {

struct Cta;
struct Warp;

enum class Kind : uint32_t { ALU, EXP, TENSOR, FRAGMENTS, SHUFFLE, COPY, WAIT };

struct Costs {  // in clocks; made by runtime/emulator/costs.py
  float alu, exp, mma, fragments, shuffle, issue, copy_latency, copy_bytes_per_clock, wgmma_flop_per_clock;
};

struct Span {
  uint32_t row;  // warp, or the number of warps: TMA, or one more: the tensor cores under wgmma
  Kind kind;
  uint32_t pc;
  double begin, end;
};

class Trace {
 public:
  void start(const Costs& costs, int64_t block, uint32_t warps);
  bool follows(const Cta& cta) const;
  const Costs& costs() const { return costs_; }
  const std::vector<Span>& spans() const { return spans_; }

  // The warp works: on a unit of its own quarter of the multiprocessor, or (no unit) on nothing shared.
  void work(Warp& warp, Kind kind, uint32_t pc, double clocks);
  void think(Warp& warp, uint32_t pc);  // one more access to registers
  void wait_until(Warp& warp, uint32_t pc, double time);
  double copy(Warp& warp, uint32_t pc, uint32_t bytes);     // returns when it has landed
  double product(double issued, uint32_t pc, double flop);  // returns when it is done

 private:
  static constexpr int QUARTERS = 4;
  void settle(Warp& warp);  // what it has thought since becomes a span
  double* unit(const Warp& warp, Kind kind);

  Costs costs_{};
  int64_t block_ = -1;
  uint32_t warps_ = 0;
  double exp_free_[QUARTERS] = {}, tensor_free_[QUARTERS] = {}, memory_free_ = 0, wgmma_free_ = 0;
  std::vector<Span> spans_;
};

}  // namespace emu
