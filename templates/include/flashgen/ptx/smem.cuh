// Dynamic shared memory: the one block of it that a kernel has, and its 32-bit address space.
#pragma once
#include "flashgen/prelude.cuh"

// First byte of the block's dynamic shared memory, aligned for every swizzle.
FG_DEVICE unsigned char* dyn_smem() {
  extern __shared__ __align__(1024) unsigned char dynamic_shared_memory[];
  return dynamic_shared_memory;
}

// cvta.to.shared (PTX ISA 9.7.9.21): the 32-bit shared address of a generic pointer.
FG_DEVICE uint32_t smem_addr(const void* pointer) { return (uint32_t)__cvta_generic_to_shared(pointer); }
