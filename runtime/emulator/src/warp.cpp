// Warp collectives: shuffle, vote, ldmatrix, which order no memory between lanes, and the one that does.
#include <cstring>

#include "memory.h"

namespace emu {

namespace {

constexpr size_t ROW_BYTES = 16;  // of an 8x8 matrix

struct Shuffle {
  float value, result;
  int lane_mask;
};

void execute_shuffle(Warp& warp) {
  for (int lane = 0; lane < WARP_SIZE; ++lane) {
    auto* const mine = static_cast<Shuffle*>(warp.arguments[lane]);
    mine->result = static_cast<Shuffle*>(warp.arguments[(lane ^ mine->lane_mask) % WARP_SIZE])->value;
  }
}

struct Vote {
  bool value;
  uint32_t result;
};

void execute_vote(Warp& warp) {
  uint32_t result = 0;
  for (int lane = 0; lane < WARP_SIZE; ++lane) {
    result |= static_cast<uint32_t>(static_cast<Vote*>(warp.arguments[lane])->value) << lane;
  }
  for (void* lane : warp.arguments) static_cast<Vote*>(lane)->result = result;
}

struct FirstLane {
  int value, result;
};

void execute_first_lane(Warp& warp) {
  const int value = static_cast<FirstLane*>(warp.arguments[0])->value;
  for (void* lane : warp.arguments) static_cast<FirstLane*>(lane)->result = value;
}

// As __syncwarp: the one collective here that orders memory between lanes.
void execute_sync(Warp& warp) {
  VectorClock joined;
  joined.reset(warp.lanes[0]->clock.seen.size());
  for (Fiber* lane : warp.lanes) {
    joined.join(lane->clock);
    lane->release();
  }
  for (Fiber* lane : warp.lanes) lane->clock.join(joined);
}

struct MatrixLoad {
  uint32_t* r;
  const unsigned char* row;
  bool transposed;
};

// The lane that gives a row's address reads it; each lane that receives a part of it must come after its writes, too.
void execute_ldmatrix(Warp& warp) {
  MatrixLoad* loads[WARP_SIZE];
  for (int lane = 0; lane < WARP_SIZE; ++lane) {
    loads[lane] = static_cast<MatrixLoad*>(warp.arguments[lane]);
    shared_offset(*warp.lanes[lane], loads[lane]->row, ROW_BYTES, ROW_BYTES, "ldmatrix");
    check(*warp.lanes[lane], loads[lane]->row, ROW_BYTES, Access::READ);
  }
  for (int lane = 0; lane < WARP_SIZE; ++lane) {
    Fiber& fiber = *warp.lanes[lane];
    for (int matrix = 0; matrix < 4; ++matrix) {
      uint32_t& r = loads[lane]->r[matrix];
      if (!loads[lane]->transposed) {
        const unsigned char* const row = loads[8 * matrix + lane / 4]->row;
        check(fiber, row, ROW_BYTES, Access::PROBE);
        memcpy(&r, row + lane % 4 * 4, 4);
        continue;
      }
      uint16_t halves[2];
      for (int i = 0; i < 2; ++i) {
        const unsigned char* const row = loads[8 * matrix + lane % 4 * 2 + i]->row;
        check(fiber, row, ROW_BYTES, Access::PROBE);
        memcpy(&halves[i], row + lane / 4 * 2, 2);
      }
      r = halves[0] | static_cast<uint32_t>(halves[1]) << 16;
    }
  }
}

struct MatrixStore {
  const uint32_t* r;
  unsigned char* row;
  bool transposed;
};

// The lane that gives a row's address writes it.
void execute_stmatrix(Warp& warp) {
  MatrixStore* stores[WARP_SIZE];
  for (int lane = 0; lane < WARP_SIZE; ++lane) {
    stores[lane] = static_cast<MatrixStore*>(warp.arguments[lane]);
    shared_offset(*warp.lanes[lane], stores[lane]->row, ROW_BYTES, ROW_BYTES, "stmatrix");
    check(*warp.lanes[lane], stores[lane]->row, ROW_BYTES, Access::WRITE);
  }
  for (int lane = 0; lane < WARP_SIZE; ++lane) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      const uint32_t r = stores[lane]->r[matrix];
      if (!stores[lane]->transposed) {
        memcpy(stores[8 * matrix + lane / 4]->row + lane % 4 * 4, &r, 4);
        continue;
      }
      for (int i = 0; i < 2; ++i) {
        const auto half = static_cast<uint16_t>(r >> 16 * i);
        memcpy(stores[8 * matrix + lane % 4 * 2 + i]->row + lane / 4 * 2, &half, 2);
      }
    }
  }
}

}  // namespace

float shfl_xor(float x, int lane_mask) {
  Fiber& fiber = enter(__builtin_return_address(0));
  Shuffle shuffle{x, 0.0f, lane_mask};
  meet(fiber, execute_shuffle, &shuffle);
  return shuffle.result;
}

uint32_t ballot(bool x) {
  Fiber& fiber = enter(__builtin_return_address(0));
  Vote vote{x, 0};
  meet(fiber, execute_vote, &vote);
  return vote.result;
}

int first_lane(int x) {
  Fiber& fiber = enter(__builtin_return_address(0));
  FirstLane exchange{x, 0};
  meet(fiber, execute_first_lane, &exchange);
  return exchange.result;
}

void sync_warp() {
  Fiber& fiber = enter(__builtin_return_address(0));
  meet(fiber, execute_sync, nullptr);
}

void ldmatrix_x4(uint32_t* r, const void* row, bool transposed) {
  Fiber& fiber = enter(__builtin_return_address(0));
  MatrixLoad load{r, static_cast<const unsigned char*>(row), transposed};
  meet(fiber, execute_ldmatrix, &load, Kind::FRAGMENTS);
}

void stmatrix_x4(void* row, const uint32_t* r, bool transposed) {
  Fiber& fiber = enter(__builtin_return_address(0));
  MatrixStore store{r, static_cast<unsigned char*>(row), transposed};
  meet(fiber, execute_stmatrix, &store, Kind::FRAGMENTS);
}

bool elect_one() {
  Fiber& fiber = enter(__builtin_return_address(0));
  meet(fiber, [](Warp&) {}, nullptr);
  return fiber.lane == fiber.warp->elected;
}

}  // namespace emu
