#include "fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>

#if defined(EMU_UCONTEXT) || !(defined(__x86_64__) || defined(__aarch64__))
#define USE_UCONTEXT 1
#include <ucontext.h>
#endif

namespace emu {

unsigned char* new_stack() {
  const size_t guard = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  void* const memory = mmap(nullptr, guard + STACK_BYTES, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED || mprotect(memory, guard, PROT_NONE) != 0) abort();
  return static_cast<unsigned char*>(memory) + guard;
}

#ifdef USE_UCONTEXT

void prepare(Context& context, unsigned char* stack, void (*function)()) {
  if (context.state == nullptr) context.state = new ucontext_t;
  auto* const target = static_cast<ucontext_t*>(context.state);
  getcontext(target);
  target->uc_stack.ss_sp = stack;
  target->uc_stack.ss_size = STACK_BYTES;
  target->uc_link = nullptr;
  makecontext(target, function, 0);
}

void switch_context(Context& from, Context& to) {
  if (from.state == nullptr) from.state = new ucontext_t;
  swapcontext(static_cast<ucontext_t*>(from.state), static_cast<ucontext_t*>(to.state));
}

#else

extern "C" void emu_switch(void** from, void* to);

#if defined(__x86_64__)
constexpr size_t SAVED_WORDS = 6;  // rbp, rbx, r12 to r15; the return address lies above them
asm(R"(
.text
.globl emu_switch
.type emu_switch, @function
emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emu_switch, .-emu_switch
)");
#else
constexpr size_t SAVED_WORDS = 20;  // x19 to x30 (the link register last), d8 to d15
asm(R"(
.text
.globl emu_switch
.type emu_switch, %function
emu_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size emu_switch, .-emu_switch
)");
#endif

void prepare(Context& context, unsigned char* stack, void (*function)()) {
  auto* word = reinterpret_cast<void**>(stack + STACK_BYTES - 64);
#if defined(__x86_64__)
  *--word = nullptr;  // where `function` would return to; keeps the stack aligned as after a call
  *--word = reinterpret_cast<void*>(function);
  for (size_t i = 0; i < SAVED_WORDS; ++i) *--word = nullptr;
#else
  for (size_t i = 0; i < SAVED_WORDS; ++i) *--word = nullptr;
  word[11] = reinterpret_cast<void*>(function);  // x30
#endif
  context.state = word;
}

void switch_context(Context& from, Context& to) { emu_switch(&from.state, to.state); }

#endif

}  // namespace emu
