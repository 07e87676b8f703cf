// The CUDA language for a C++ compiler. Included before the kernel's text.
#pragma once
// The C header alone: libstdc++'s own <math.h> brings all of <cmath>, which took a third of a kernel's compilation.
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS 1
#include <math.h>
#undef _GLIBCXX_INCLUDE_NEXT_C_HEADERS

#include "emu.h"

#define __global__
#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__

#define threadIdx (emu::thread_index())
#define blockIdx (emu::block_index())
#define blockDim (emu::block_size())
#define gridDim (emu::grid_size())

// The launch: `kernel(p)` with p on the thread's own stack, as the constant bank is each thread's own to read.
#define EMU_KERNEL(kernel)                                                                        \
  extern "C" __attribute__((no_sanitize_thread)) void emu_entry(const void* params) {            \
    kernel(*static_cast<const Params*>(params));                                                  \
  }                                                                                               \
  extern "C" __attribute__((no_sanitize_thread)) unsigned emu_params_bytes() { return sizeof(Params); }
