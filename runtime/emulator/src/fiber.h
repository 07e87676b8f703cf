// CUDA threads as fibers: a stack each, and a switch that saves what the calling convention asks a callee to keep.
#pragma once
#include <cstddef>

namespace emu {

struct Context {
  void* state = nullptr;  // the saved stack pointer, or a ucontext_t where there is no switch for the machine
};

constexpr size_t STACK_BYTES = 96 << 10;

// A stack of STACK_BYTES with an unmapped page below it. Never freed: runs reuse them.
unsigned char* new_stack();

// Makes `context` start `function` on `stack` at the first switch to it. `function` must never return.
void prepare(Context& context, unsigned char* stack, void (*function)());

// Saves the running context in `from` and continues `to`.
void switch_context(Context& from, Context& to);

}  // namespace emu
