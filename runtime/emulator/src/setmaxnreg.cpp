// setmaxnreg (PTX ISA 9.7.19): the registers of a block as a pool, from which warps take and to which they give.
#include "fault.h"
#include "machine.h"

namespace emu {

namespace {


struct Request {
  int registers;
  bool raise;
};

void execute(Warp& warp) {
  const auto& request = *static_cast<const Request*>(warp.arguments[0]);
  for (const void* lane : warp.arguments) {
    const auto& other = *static_cast<const Request*>(lane);
    if (other.registers != request.registers || other.raise != request.raise) {
      fail(*warp.lanes[0], "collective", {}, "lanes of one warp ask setmaxnreg for different things");
    }
  }
  if (request.raise) return;  // granted below, lane 0 waiting for all
  Cta& cta = *warp.cta;
  if (request.registers > warp.registers) {
    fail(*warp.lanes[0], "argument", {}, "setmaxnreg.dec to %d registers from %d", request.registers, warp.registers);
  }
  cta.registers_free += (warp.registers - request.registers) * WARP_SIZE;
  warp.registers = request.registers;
  for (Fiber& fiber : cta.fibers) {
    if (fiber.wait == Wait::REGISTERS) fiber.wake();
  }
}

}  // namespace

void start_registers(Cta& cta) {
  const int registers = static_cast<int>(machine.launch->registers);
  for (Warp& warp : cta.warps) warp.registers = registers;
  cta.registers_free = 0;  // what the launch left over is not in the pool
}

void setmaxnreg(int registers, bool raise) {
  Fiber& fiber = enter(__builtin_return_address(0));
  Request request{registers, raise};
  meet(fiber, execute, &request);
  if (!raise) return;
  Warp& warp = *fiber.warp;
  if (fiber.lane == 0) {
    if (registers < warp.registers) {
      fail(fiber, "argument", {}, "setmaxnreg.inc to %d registers from %d", registers, warp.registers);
    }
    const int needed = (registers - warp.registers) * WARP_SIZE;
    while (fiber.cta->registers_free < needed) fiber.block(Wait::REGISTERS, registers);
    fiber.cta->registers_free -= needed;
    warp.registers = registers;
  }
  meet(fiber, [](Warp&) {}, nullptr);
}

}  // namespace emu
