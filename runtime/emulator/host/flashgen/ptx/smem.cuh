// Host twin of ptx/smem.cuh.
#pragma once
#include "flashgen/prelude.cuh"

FG_DEVICE unsigned char* dyn_smem() { return emu::dyn_smem(); }
FG_DEVICE uint32_t smem_addr(const void* pointer) { return emu::smem_addr(pointer); }
