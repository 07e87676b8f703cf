// Clusters: ranks, their barrier (PTX ISA 9.7.13.3), and the shared memory of other blocks.
#include "mbarrier.h"
#include "memory.h"

namespace emu {

void* map_to_block(const Fiber& fiber, const void* pointer, uint32_t rank) {
  if (rank >= machine.launch->cluster) {
    fail(fiber, "argument", {}, "block %u of a cluster of %u", rank, machine.launch->cluster);
  }
  return fiber.cta->cluster->blocks[rank]->smem + shared_offset(fiber, pointer, 0, 1, "mapa");
}

uint32_t cluster_rank() { return current->cta->rank; }
uint32_t cluster_blocks() { return machine.launch->cluster; }
void* mapa(const void* pointer, uint32_t rank) {
  return map_to_block(enter(__builtin_return_address(0)), pointer, rank);
}

void cluster_arrive(bool release) {
  Fiber& fiber = enter(__builtin_return_address(0));
  maybe_yield(fiber);
  Cluster& cluster = *fiber.cta->cluster;
  if (fiber.cluster_arrived) fail(fiber, "barrier", {}, "barrier.cluster.arrive twice without a wait between them");
  fiber.cluster_arrived = true;
  fiber.waits_on = cluster.phase;
  release ? cluster.joined.join(fiber.clock) : cluster.joined.join_reads(fiber.clock);
  fiber.release();
  if (++cluster.arrived < machine.threads * static_cast<int>(machine.launch->cluster)) return;
  cluster.ended = cluster.joined;
  cluster.arrived = 0;
  ++cluster.phase;
  for (Fiber* waiting : cluster.waiting) waiting->wake();
  cluster.waiting.clear();
}

void cluster_wait() {
  Fiber& fiber = enter(__builtin_return_address(0));
  Cluster& cluster = *fiber.cta->cluster;
  if (!fiber.cluster_arrived) fail(fiber, "barrier", {}, "barrier.cluster.wait without an arrive before it");
  if (cluster.phase == fiber.waits_on) {
    cluster.waiting.push_back(&fiber);
    fiber.block(Wait::CLUSTER_BARRIER);
  }
  fiber.cluster_arrived = false;
  fiber.clock.join(cluster.ended);
}

}  // namespace emu
