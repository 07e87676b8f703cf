"""The conformance set of the PTX drawer: `CASES`, name -> Case. Barriers and atomics are here, the rest in the
modules that are imported.
"""
from __future__ import annotations

import dataclasses

import drawer_model as ptx
import numpy as np
from drawer_case import Arrays, Case
from drawer_copies import copy_cases
from drawer_products import product_cases
from drawer_registers import WORD, register_cases, words, zeros

# Barriers

def barrier_cases() -> list[Case]:
    random_int = {"x": "const int", "out": "int"}

    def pair(rng: np.random.Generator) -> Arrays:
        return {"x": rng.integers(0, 1000, (8, 32), dtype=np.int32), "out": zeros(8, 32, dtype=np.int32)}

    def handed_over(inputs: Arrays) -> Arrays:
        return {"out": inputs["x"][:, ::-1] * 2}

    body = """
  int* slot = (int*)dyn_smem();
  const int lane = threadIdx.x %% 32;
  for (int i = 0; i < 8; ++i) {
    if (threadIdx.x < 32) {
      slot[lane] = p.x[32 * i + lane];
      %s
      %s
    } else {
      %s
      p.out[32 * i + lane] = 2 * slot[31 - lane];
      %s
    }
  }
"""
    named = Case("named_barrier", ("named_barrier", "smem"), random_int,
                 body % ("bar_arrive<1, 64>();", "bar_sync<2, 64>();", "bar_sync<1, 64>();", "bar_arrive<2, 64>();"),
                 pair, handed_over, threads=64, smem=128, hopper=False)
    ring = Case("named_barrier_at", ("named_barrier", "smem"), random_int,
                body % ("bar_arrive_of(3 + i % 2, 64);", "bar_sync_at<64>(5 + i % 2);",
                        "bar_sync_at<64>(3 + i % 2);", "bar_arrive_of(5 + i % 2, 64);"),
                pair, handed_over, threads=64, smem=128, hopper=False)
    counted = Case("named_barrier_of", ("named_barrier", "smem"), random_int,
                   body % ("bar_arrive_of(3 + i % 2, blockDim.x);", "bar_sync_of(5 + i % 2, blockDim.x);",
                           "bar_sync_of(3 + i % 2, blockDim.x);", "bar_arrive_of(5 + i % 2, blockDim.x);"),
                   pair, handed_over, threads=64, smem=128, hopper=False)

    init = """
  uint64_t* full = (uint64_t*)dyn_smem();
  uint64_t* empty = full + 1;
  int* slot = (int*)(full + 2);
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    mbarrier_init(full, 32);
    mbarrier_init(empty, 32);
    fence_mbarrier_init();
  }
  sync_block();
"""
    handshake = Case("mbarrier", ("mbarrier", "warp"), random_int, init + """
  for (int i = 0; i < 8; ++i) {
    if (threadIdx.x < 32) {
      mbarrier_wait_parity(empty, (i & 1) ^ 1);
      slot[lane] = p.x[32 * i + lane];
      mbarrier_arrive(full);
    } else {
      mbarrier_wait_parity(full, i & 1);
      p.out[32 * i + lane] = 2 * slot[31 - lane];
      mbarrier_arrive(empty);
    }
  }
""", pair, handed_over, threads=64, smem=256)

    # One thread, no progress elsewhere: every answer is fixed. Each phase needs two arrivals.
    answers = np.array([1, 0, 0, 1, 0, 0, 1, 0, 0, 1], np.int32)
    polled = Case("mbarrier_try_wait", ("mbarrier",), {"out": "int"}, """
  uint64_t* barrier = (uint64_t*)dyn_smem();
  if (threadIdx.x != 0) return;
  mbarrier_init(barrier, 2);
  fence_mbarrier_init();
  p.out[0] = mbarrier_try_wait_parity(barrier, 1);
  p.out[1] = mbarrier_try_wait_parity(barrier, 0);
  mbarrier_arrive(barrier);
  p.out[2] = mbarrier_try_wait_parity(barrier, 0);
  mbarrier_arrive(barrier);
  p.out[3] = mbarrier_try_wait_parity(barrier, 0);
  p.out[4] = mbarrier_try_wait_parity(barrier, 1);
  mbarrier_arrive(barrier);
  p.out[5] = mbarrier_try_wait_parity(barrier, 1);
  mbarrier_arrive_expect_tx(barrier, 0);
  p.out[6] = mbarrier_try_wait_parity(barrier, 1);
  p.out[7] = mbarrier_try_wait_parity(barrier, 0);
  mbarrier_arrive_expect_tx(barrier, 16);
  mbarrier_arrive(barrier);
  p.out[8] = mbarrier_try_wait_parity(barrier, 0);
  p.out[9] = mbarrier_try_wait_parity(barrier, 1);
""", lambda rng: {"out": zeros(10, dtype=np.int32)}, lambda inputs: {"out": answers}, smem=64)
    tested = dataclasses.replace(polled, name="mbarrier_test_wait", body=polled.body.replace("try_wait", "test_wait"))
    return [named, ring, counted, handshake, polled, tested, *cluster_cases()]


def cluster_cases() -> list[Case]:
    def numbers(rng: np.random.Generator) -> Arrays:
        return {"x": rng.integers(0, 1000, (4, 2, 32), dtype=np.int32), "out": zeros(4, 2, 32, dtype=np.int32)}

    ranks = Case("cluster_ranks", ("cluster",), {"out": WORD}, """
  if (threadIdx.x == 0) {
    p.out[2 * blockIdx.x] = cluster_ctarank();
    p.out[2 * blockIdx.x + 1] = cluster_nctarank();
  }
""", lambda rng: {"out": zeros(4, 2)},
        lambda inputs: {"out": np.array([[0, 2], [1, 2], [0, 2], [1, 2]], np.uint32)}, blocks=4, cluster=2)

    def swapped(inputs: Arrays) -> Arrays:
        return {"out": inputs["x"][:, ::-1, ::-1].copy()}

    exchange = """
  int* slot = (int*)dyn_smem();
  const uint32_t rank = cluster_ctarank();
  for (int i = 0; i < 4; ++i) {
    slot[threadIdx.x] = p.x[64 * i + 32 * rank + threadIdx.x];
    %s
    p.out[64 * i + 32 * rank + threadIdx.x] = mapa(slot, rank ^ 1)[31 - threadIdx.x];
    %s
  }
"""
    pointers = {"x": "const int", "out": "int"}
    mapped = Case("mapa", ("cluster",), pointers, exchange % ("cluster_sync();", "cluster_sync();"), numbers, swapped,
                  blocks=2, cluster=2, smem=128)
    # The second barrier only keeps the slot from being overwritten while it is read: no memory order needed.
    relaxed = Case("cluster_arrive_wait", ("cluster",), pointers,
                   exchange % ("cluster_arrive();\n    cluster_wait();",
                               "cluster_arrive_relaxed();\n    cluster_wait();"),
                   numbers, swapped, blocks=2, cluster=2, smem=128)

    # Each block reads its neighbour's slot, then says so at the neighbour's barrier, which waits before it writes anew.
    released = Case("mbarrier_arrive_cluster", ("mbarrier", "warp"), pointers, """
  uint64_t* empty = (uint64_t*)dyn_smem();
  int* slot = (int*)(empty + 2);
  const uint32_t rank = cluster_ctarank();
  if (threadIdx.x == 0) {
    mbarrier_init(empty, 32);
    fence_mbarrier_init();
  }
  cluster_sync();
  for (int i = 0; i < 4; ++i) {
    mbarrier_wait_parity(empty, (i & 1) ^ 1);
    slot[threadIdx.x] = p.x[64 * i + 32 * rank + threadIdx.x];
    cluster_sync();
    p.out[64 * i + 32 * rank + threadIdx.x] = mapa(slot, rank ^ 1)[31 - threadIdx.x];
    mbarrier_arrive_cluster(empty, rank ^ 1);
  }
  cluster_sync();
""", numbers, swapped, blocks=2, cluster=2, smem=256)
    return [ranks, mapped, relaxed, released]


# Device memory between blocks

def atomic_cases() -> list[Case]:
    def tickets(inputs: Arrays) -> Arrays:
        return {"counter": np.array([512], np.int32), "seen": np.ones(512, np.int32)}

    taken = Case("atom_add_relaxed", ("atomic",), {"counter": "int", "seen": "int"}, """
  p.seen[atom_add_relaxed(p.counter, 1)] = 1;
""", lambda rng: {"counter": zeros(1, dtype=np.int32), "seen": zeros(512, dtype=np.int32)}, tickets, threads=64,
        blocks=8, hopper=False)

    def parts(rng: np.random.Generator) -> Arrays:
        return {"x": rng.integers(-1000, 1000, (8, 32), dtype=np.int32), "parts": zeros(8, 32, dtype=np.int32),
                "counter": zeros(1, dtype=np.int32), "out": zeros(32, dtype=np.int32)}

    def merged(inputs: Arrays) -> Arrays:
        return {"out": (inputs["x"] * 3).sum(0, dtype=np.int32), "counter": np.array([8], np.int32)}

    pointers = {"x": "const int", "parts": "int", "counter": "int", "out": "int"}
    sum_up = """
    int sum = 0;
    for (int i = 0; i < 8; ++i) sum += p.parts[32 * i + threadIdx.x];
    p.out[threadIdx.x] = sum;
  }
"""
    # The block that comes last merges the parts of all.
    last = Case("atom_add_acq_rel", ("atomic", "smem", "warp"), pointers, """
  int* before = (int*)dyn_smem();
  p.parts[32 * blockIdx.x + threadIdx.x] = 3 * p.x[32 * blockIdx.x + threadIdx.x];
  sync_block();
  if (threadIdx.x == 0) *before = atom_add_acq_rel(p.counter, 1);
  sync_block();
  if (*before == 7) {""" + sum_up, parts, merged, blocks=8, smem=16, hopper=False)
    # Block 0 waits for all and merges.
    first = Case("red_add_release", ("atomic", "warp"), pointers, """
  p.parts[32 * blockIdx.x + threadIdx.x] = 3 * p.x[32 * blockIdx.x + threadIdx.x];
  sync_block();
  if (threadIdx.x == 0) red_add_release(p.counter, 1);
  if (blockIdx.x == 0) {
    if (threadIdx.x == 0) wait_until_equal(p.counter, 8);
    sync_block();""" + sum_up, parts, merged, blocks=8, hopper=False)
    fenced = Case("fence_acq_rel_gpu", ("atomic", "fence", "warp"), pointers, """
  p.parts[32 * blockIdx.x + threadIdx.x] = 3 * p.x[32 * blockIdx.x + threadIdx.x];
  sync_block();
  if (threadIdx.x == 0) {
    fence_acq_rel_gpu();
    atom_add_relaxed(p.counter, 1);
  }
  if (blockIdx.x == 0) {
    if (threadIdx.x == 0) wait_until_equal(p.counter, 8);
    sync_block();""" + sum_up, parts, merged, blocks=8, hopper=False)

    def in_turn(inputs: Arrays) -> Arrays:
        value = inputs["out"]
        for block in range(8):
            value = (value * 3 + block) % 1000
        return {"out": value, "turn": np.array([8], np.int32), "seen": np.arange(8, dtype=np.int32)}

    # A chain: block i acts when the semaphore says i.
    chain = Case("st_release", ("atomic", "warp"), {"turn": "int", "seen": "int", "out": "int"}, """
  if (threadIdx.x == 0) {
    wait_until_equal(p.turn, blockIdx.x);
    p.seen[blockIdx.x] = ld_acquire(p.turn);
  }
  sync_block();
  p.out[threadIdx.x] = (p.out[threadIdx.x] * 3 + blockIdx.x) % 1000;
  sync_block();
  if (threadIdx.x == 0) st_release(p.turn, blockIdx.x + 1);
""", lambda rng: {"turn": zeros(1, dtype=np.int32), "seen": zeros(8, dtype=np.int32),
                  "out": rng.integers(0, 1000, 32, dtype=np.int32)}, in_turn, blocks=8, hopper=False)

    summed = Case("red_add_f32", ("atomic",), {"x": "const float", "out": "float"}, """
  red_add_f32(p.out + threadIdx.x % 16, p.x[32 * blockIdx.x + threadIdx.x]);
""", lambda rng: {"x": rng.integers(-99, 99, (8, 32)).astype(np.float32), "out": zeros(16, dtype=np.float32)},
        lambda inputs: {"out": inputs["x"].reshape(-1, 16).sum(0)}, blocks=8, hopper=False)

    summed_by_four = Case("red_add_f32x4", ("atomic",), {"x": "const float", "out": "float"}, """
  float four[4];
  for (int i = 0; i < 4; ++i) four[i] = p.x[128 * blockIdx.x + 4 * threadIdx.x + i];
  red_add_f32x4(p.out + threadIdx.x % 8 * 4, four);
""", lambda rng: {"x": rng.integers(-99, 99, (8, 128)).astype(np.float32), "out": zeros(32, dtype=np.float32)},
        lambda inputs: {"out": inputs["x"].reshape(-1, 32).sum(0)}, blocks=8)

    def twice(inputs: Arrays) -> Arrays:
        once = 3 * inputs["out"] + np.arange(1024, dtype=np.uint32)
        return {"out": 3 * once + np.arange(1024, dtype=np.uint32)}

    # Launched twice; the second may start while the first runs, and must still see all of it.
    dependent = Case("griddepcontrol", ("griddepcontrol",), {"out": WORD}, """
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  const int i = 32 * blockIdx.x + threadIdx.x;
  p.out[i] = 3 * p.out[i] + i;
""", lambda rng: {"out": words(rng, 1024)}, twice, blocks=32, launches=2)
    return [taken, last, first, fenced, chain, summed, summed_by_four, _summed_pairs("bf16"), _summed_pairs("fp16"),
            dependent]


def _summed_pairs(element: str) -> Case:
    """Integers that add up exactly, and an infinity."""
    to_bits = {"bf16": ptx.float_to_bf16, "fp16": ptx.float_to_fp16}[element]

    def inputs(rng: np.random.Generator) -> Arrays:
        x = rng.integers(-15, 16, (8, 32, 2)).astype(np.float32)
        x[3, 5, 1] = np.inf
        halves = to_bits(x).astype(np.uint32)
        return {"x": halves[..., 0] | halves[..., 1] << 16, "out": zeros(16)}

    def model(arrays: Arrays) -> Arrays:
        low, high = (to_bits(ptx.TO_FLOAT[element](half.astype(np.uint16)).reshape(-1, 16).sum(0)).astype(np.uint32)
                     for half in (arrays["x"] & 0xffff, arrays["x"] >> 16))
        return {"out": low | high << 16}

    return Case(f"red_add2_{element}", ("atomic",), {"x": f"const {WORD}", "out": WORD}, f"""
  {element}* const pair = ({element}*)(p.out + threadIdx.x % 16);
  red_add2({element}{{}}, pair, p.x[32 * blockIdx.x + threadIdx.x]);
""", inputs, model, blocks=8)


CASES: dict[str, Case] = {
    case.name: case for case in [*register_cases(), *barrier_cases(), *atomic_cases(), *copy_cases(), *product_cases()]}
