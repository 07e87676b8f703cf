// Products of a warpgroup on their way from issue to wait.
#pragma once
#include "machine.h"

namespace emu {

struct Accumulator {
  int registers = 0;
  std::vector<float> values;  // [thread][register]
  float* where[WARPGROUP_SIZE] = {};
  bool returned[WARPGROUP_SIZE] = {};
  int num_returned = 0;
  uint64_t last_group = 0;
};

// What all threads of the warpgroup have to say alike when they issue a product.
struct Issue {
  Type type{};
  int n = 0;
  bool a_in_registers = false, a_mn_major = false, b_mn_major = false, adds = false;
  uint64_t a = 0, b = 0, group = 0;
  uint32_t pc = 0;  // may differ: the place of the first thread stands for all

  bool same_as(const Issue& o) const {
    return type == o.type && n == o.n && a_in_registers == o.a_in_registers && a_mn_major == o.a_mn_major &&
           b_mn_major == o.b_mn_major && adds == o.adds && a == o.a && b == o.b && group == o.group;
  }
};

struct Product : Issue {
  explicit Product(const Issue& issue) : Issue(issue) {}

  std::shared_ptr<Accumulator> accumulator;
  uint32_t fragments[WARPGROUP_SIZE][4] = {};
  int issued_by = 0, collected_by = 0;
  bool done = false;
  VectorClock warps[4];  // what all threads of each warp have seen
  VectorClock all;       // and all threads, once all have issued it
  Clock moment = 0;
  double time = 0;  // traced: of its issue, then of its end
};

struct Warpgroup {
  Cta* cta = nullptr;
  int first_thread = 0;
  uint16_t agent = 0;
  std::deque<std::unique_ptr<Product>> products;
  uint64_t base = 0;      // number of the front one
  uint64_t executed = 0;
  std::vector<std::shared_ptr<Accumulator>> accumulators;
};

// Runs the next product in order: reads its operands, adds to its accumulator.
void execute_product(Warpgroup& warpgroup);

}  // namespace emu
