// Host twin of ptx/fence.cuh.
#pragma once
#include "flashgen/prelude.cuh"

FG_DEVICE void fence_proxy_async_shared() { emu::fence_proxy_async(false); }
FG_DEVICE void fence_proxy_async_global() { emu::fence_proxy_async(true); }
FG_DEVICE void fence_acq_rel_gpu() { emu::fence_acq_rel(); }
