// fence (PTX ISA 9.7.13.4).
#pragma once
#include "flashgen/prelude.cuh"

// fence.proxy.async: what this thread wrote to shared memory becomes visible to the async proxy (bulk stores, wgmma).
// Every writer, before the barrier after which one thread issues.
FG_DEVICE void fence_proxy_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The same for global memory: before this kernel's own bulk or tensor loads read it.
FG_DEVICE void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// fence.acq_rel.gpu: orders this thread's accesses before and after it, for all threads of the device.
FG_DEVICE void fence_acq_rel_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
