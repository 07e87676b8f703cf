// Host twin of ptx/cp_async.cuh.
#pragma once
#include "flashgen/ptx/smem.cuh"

FG_DEVICE void cp_async_16(void* smem, const void* gmem) { emu::cp_async(smem, gmem, 16); }
FG_DEVICE void cp_async_16_zfill(void* smem, const void* gmem, uint32_t bytes) { emu::cp_async(smem, gmem, bytes); }
FG_DEVICE void cp_async_commit() { emu::cp_async_commit(); }

template <int PENDING>
FG_DEVICE void cp_async_wait() {
  emu::cp_async_wait(PENDING);
}
