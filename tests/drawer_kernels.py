"""The conformance set of the PTX drawer: `CASES`, name -> Case. Registers, barriers and atomics are here, copies in
drawer_copies.py, matrix products in drawer_products.py.
"""
from __future__ import annotations

import drawer_model as ptx
import numpy as np
from drawer_case import Arrays, Case
from drawer_copies import copy_cases
from drawer_products import product_cases

WORD = "uint32_t"


def words(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(0, 2**32, shape, dtype=np.uint32)


def zeros(*shape: int, dtype: type = np.uint32) -> np.ndarray:
    return np.zeros(shape, dtype)


def special_floats(rng: np.random.Generator, count: int) -> np.ndarray:
    """Random bit patterns, and what rounding stumbles over: ties, subnormals, the largest, infinities, NaN."""
    ties = (np.arange(64, dtype=np.uint32) << 15) + np.uint32(0x3f800000)   # bf16
    finer = (np.arange(64, dtype=np.uint32) << 12) + np.uint32(0x3f800000)  # fp16
    edges = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 65504, 65519.99, 65520, 3.3895e38, 3.4028235e38, 2.0**-14,
                      2.0**-24, 2.0**-25, 2.0**-25 * 1.001, 6.1e-5, 1e-40, -1e-45], np.float32).view(np.uint32)
    nans = np.array([0x7f800001, 0xffc00000, 0xffffffff], np.uint32)
    chosen = np.concatenate([ties, ties + np.uint32(1), ties - np.uint32(1), finer, finer + np.uint32(1), edges, nans])
    ranged = rng.standard_normal(count // 2).astype(np.float32).view(np.uint32)
    rest = words(rng, count - chosen.size - ranged.size)
    return np.concatenate([chosen, ranged, rest]).view(np.float32)


# Registers

def _pack2(element: str) -> Case:
    rounded = {"bf16": ptx.float_to_bf16, "fp16": ptx.float_to_fp16}[element]

    def model(inputs: Arrays) -> Arrays:
        low, high = rounded(inputs["x"]), rounded(inputs["x"][::-1])
        return {"out": low.astype(np.uint32) | high.astype(np.uint32) << 16}

    return Case(f"pack2_{element}", ("convert",), {"x": "const float", "out": WORD}, f"""
  for (int i = threadIdx.x; i < 2048; i += 32) p.out[i] = pack2({element}{{}}, p.x[i], p.x[2047 - i]);
""", lambda rng: {"x": special_floats(rng, 2048), "out": zeros(2048)}, model, hopper=False)


def _to_float(element: str) -> Case:
    return Case(f"to_float_{element}", ("convert",), {"x": f"const {element}", "out": "float"}, """
  for (int i = threadIdx.x; i < 65536; i += 256) p.out[i] = to_float(p.x[i]);
""", lambda rng: {"x": ptx.all_bits(element), "out": zeros(65536, dtype=np.float32)},
        lambda inputs: {"out": ptx.TO_FLOAT[element](inputs["x"])}, threads=256, hopper=False)


def _function(name: str, exact, x, *, relative: float, absolute: float = 0.0) -> Case:
    """A function of one float, against fp64 rounded once; .ftz on both sides."""
    def model(inputs: Arrays) -> Arrays:
        with np.errstate(all="ignore"):
            return {"out": ptx.flush(exact(ptx.flush(inputs["x"]).astype(np.float64)).astype(np.float32))}

    return Case(name, ("math",), {"x": "const float", "out": "float"}, f"""
  for (int i = threadIdx.x; i < 4096; i += 32) p.out[i] = {name}(p.x[i]);
""", lambda rng: {"x": x(rng), "out": zeros(4096, dtype=np.float32)}, model, hopper=False, relative=relative,
        absolute=absolute)


def register_cases() -> list[Case]:
    def near_scores(rng: np.random.Generator) -> np.ndarray:
        x = special_floats(rng, 4096)
        x[2048:] = rng.uniform(-130, 20, 2048)
        return x

    def positive(rng: np.random.Generator) -> np.ndarray:
        x = special_floats(rng, 4096)
        x[2048:3072] = rng.uniform(0.5, 2, 1024)
        x[3072:] = np.exp(rng.uniform(-80, 80, 1024))
        return x

    shuffled = Case("shfl_xor", ("warp",), {"x": "const float", "out": "float"}, """
  for (int mask = 0; mask < 32; ++mask) p.out[32 * mask + threadIdx.x] = shfl_xor(p.x[threadIdx.x], mask);
""", lambda rng: {"x": rng.standard_normal(32).astype(np.float32), "out": zeros(32, 32, dtype=np.float32)},
        lambda inputs: {"out": inputs["x"][np.arange(32)[:, None] ^ np.arange(32)]}, hopper=False)

    def votes(inputs: Arrays) -> Arrays:
        warps = inputs["x"].reshape(-1, 2, 32) != 0
        return {"any": np.repeat(warps.any(2), 32, 1).astype(np.int32).reshape(-1, 64),
                "count": np.repeat(warps.sum(2), 32, 1).astype(np.int32).reshape(-1, 64),
                "block": np.repeat(warps.any((1, 2)), 64).astype(np.int32).reshape(-1, 64)}

    def ballots(rng: np.random.Generator) -> Arrays:
        x = rng.integers(0, 2, (8, 64), dtype=np.int32)
        x[1], x[2, :32], x[3], x[3, 63] = 0, 0, 0, 1
        return {"x": x, **{name: zeros(8, 64, dtype=np.int32) for name in ("any", "count", "block")}}

    voted = Case("votes", ("warp",), {"x": "const int", "any": "int", "count": "int", "block": "int"}, """
  for (int i = threadIdx.x; i < 8 * 64; i += 64) {
    const bool x = p.x[i] != 0;
    p.any[i] = any_in_warp(x);
    p.count[i] = count_in_warp(x);
    p.block[i] = any_in_block(x);
  }
""", ballots, votes, threads=64, hopper=False)

    elected = Case("elect_one", ("elect", "warp"), {"out": "int"}, """
  const bool first = elect_one();
  sync_block();
  const bool second = elect_one();
  const int leaders = count_in_warp(first);
  const int same = count_in_warp(first == second);
  if (threadIdx.x % 32 == 7) {
    p.out[threadIdx.x / 32 * 2] = leaders;
    p.out[threadIdx.x / 32 * 2 + 1] = same;
  }
""", lambda rng: {"out": zeros(4, 2, dtype=np.int32)},
        lambda inputs: {"out": np.tile(np.array([1, 32], np.int32), (4, 1))}, threads=128)

    moved = Case("setmaxnreg", ("setmaxnreg",), {"x": "const int", "out": "int"}, """
  if (threadIdx.x < 128) {
    setmaxnreg_dec<24>();
    p.out[threadIdx.x] = p.x[threadIdx.x] + 1;
  } else {
    setmaxnreg_inc<240>();
    p.out[threadIdx.x] = p.x[threadIdx.x] + 2;
  }
""", lambda rng: {"x": rng.integers(0, 1000, 384, dtype=np.int32), "out": zeros(384, dtype=np.int32)},
        lambda inputs: {"out": inputs["x"] + np.where(np.arange(384) < 128, 1, 2).astype(np.int32)}, threads=384)

    # Fields of the descriptor, read bit by bit; the start address relative to that of the shared memory.
    fields = np.array([0, 48, 0x1000 >> 4, 512 >> 4, 2048, 2 << 30, 3], np.uint32)
    described = Case("wgmma_descriptor", ("wgmma",), {"out": WORD}, """
  unsigned char* smem = dyn_smem();
  const uint64_t d = wgmma_descriptor(smem + 2048, SWIZZLE_64B, 0x1000, 512);
  p.out[0] = smem_addr(smem) % 1024;
  p.out[1] = smem_addr(smem + 48) - smem_addr(smem);
  p.out[2] = (uint32_t)(d >> 16) & 0xffff;
  p.out[3] = (uint32_t)(d >> 32) & 0xffff;
  p.out[4] = (uint32_t)(d & 0xffff) * 16 - smem_addr(smem);
  p.out[5] = (uint32_t)(d >> 32) & 0xffff0000;
  p.out[6] = (uint32_t)(wgmma_descriptor_advance(d, 48) - d);
""", lambda rng: {"out": zeros(7)}, lambda inputs: {"out": fields}, threads=1, smem=4096)

    return [
        _pack2("bf16"), _pack2("fp16"), _to_float("bf16"), _to_float("fp16"),
        _function("exp2_approx", np.exp2, near_scores, relative=2.0**-22),
        _function("log2_approx", np.log2, positive, relative=2.0**-22, absolute=2.0**-22),
        shuffled, voted, elected, moved, described,
    ]


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
                body % ("bar_arrive_at<64>(3 + i % 2);", "bar_sync_at<64>(5 + i % 2);",
                        "bar_sync_at<64>(3 + i % 2);", "bar_arrive_at<64>(5 + i % 2);"),
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
    return [named, ring, handshake, polled, *cluster_cases()]


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
    return [taken, last, first, fenced, chain, summed, dependent]


CASES: dict[str, Case] = {
    case.name: case for case in [*register_cases(), *barrier_cases(), *atomic_cases(), *copy_cases(), *product_cases()]}
