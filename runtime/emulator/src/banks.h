// Shared-memory bank conflicts, counted per access site as the hardware would serve them: 32 banks of 4 bytes, one
// wavefront per distinct word of the busiest bank; 8- and 16-byte accesses go by half and quarter warps.
#pragma once
#include <cstdint>
#include <map>
#include <unordered_map>
#include <vector>

namespace emu {

struct BankSite {
  uint64_t instructions = 0;
  uint64_t wavefronts = 0;
  uint64_t ideal = 0;
};

using BankSites = std::map<uint32_t, BankSite>;  // by pc

// Lanes run one after the other, so the n-th access of each lane at one site is matched up here into instructions.
class PendingAccesses {
 public:
  void add(uint32_t pc, int lane, uint32_t offset, uint32_t bytes);
  void flush(BankSites& sites);

 private:
  struct Instruction {
    uint32_t bytes;
    uint32_t mask = 0;
    uint32_t offsets[32];
  };
  struct Site {
    uint32_t seen[32] = {};
    std::vector<Instruction> instructions;
  };
  std::unordered_map<uint32_t, Site> sites_;
};

// Serves one instruction: `count` lanes' offsets of `bytes` each.
void serve(BankSite& site, const uint32_t* offsets, int count, uint32_t bytes);

}  // namespace emu
