#include "banks.h"

#include <algorithm>

namespace emu {

constexpr uint32_t BANKS = 32;  // also the most words that one phase can put on a bank

void serve(BankSite& site, const uint32_t* offsets, int count, uint32_t bytes) {
  const int phase = bytes >= 16 ? 8 : bytes == 8 ? 16 : 32;  // lanes served together
  ++site.instructions;
  for (int first = 0; first < count; first += phase) {
    uint32_t words[BANKS][BANKS];  // distinct ones, by bank
    uint32_t load[BANKS] = {}, distinct = 0;
    for (int i = first; i < std::min(first + phase, count); ++i) {
      for (uint32_t word = offsets[i] / 4; word <= (offsets[i] + bytes - 1) / 4; ++word) {
        uint32_t* const known = words[word % BANKS];
        uint32_t& n = load[word % BANKS];
        if (n == BANKS || std::find(known, known + n, word) != known + n) continue;
        known[n++] = word;
        ++distinct;
      }
    }
    site.wavefronts += *std::max_element(load, load + BANKS);
    site.ideal += (distinct + BANKS - 1) / BANKS;
  }
}

void PendingAccesses::add(uint32_t pc, int lane, uint32_t offset, uint32_t bytes) {
  Site& site = sites_[pc];
  const uint32_t n = site.seen[lane]++;
  if (n >= site.instructions.size()) site.instructions.push_back({bytes, 0, {}});
  Instruction& instruction = site.instructions[n];
  instruction.mask |= 1u << lane;
  instruction.offsets[lane] = offset;
}

void PendingAccesses::flush(BankSites& sites) {
  if (sites_.empty()) return;
  for (auto& [pc, site] : sites_) {
    for (const Instruction& instruction : site.instructions) {
      uint32_t offsets[32];
      int count = 0;
      for (int lane = 0; lane < 32; ++lane) {
        if (instruction.mask >> lane & 1) offsets[count++] = instruction.offsets[lane];
      }
      serve(sites[pc], offsets, count, instruction.bytes);
    }
  }
  sites_.clear();
}

}  // namespace emu
