// What copies need of mbarriers and of the cluster.
#pragma once
#include "machine.h"

namespace emu {

// The object at `offset` in `cta`, to which a copy of `fiber` will report. A fault if it is not ready for that.
Mbarrier& copy_target(const Fiber& fiber, Cta& cta, uint32_t offset);

// `bytes` have landed. `issued`: the past of the copy; `landed`: the moment of the object's engine; `time`: traced.
void report_bytes(Cta& cta, uint32_t offset, uint32_t bytes, const VectorClock& issued, Clock landed, double time);

// Where an address in the fiber's own shared memory lies in block `rank` of its cluster.
void* map_to_block(const Fiber& fiber, const void* pointer, uint32_t rank);

}  // namespace emu
