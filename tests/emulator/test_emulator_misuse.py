"""Misuse of each Hopper instruction, and of the orders between blocks, in kernels of a few lines."""
from __future__ import annotations

import pytest
from drawer_case import TensorMapSpec
from emulator_kit import fault_of, small_case

from flashgen.codegen.wgmma import WgmmaShape
from flashgen.runtime.emulator.schedule import POLICIES, Schedule

HEADERS = ("atomic", "bulk", "cluster", "convert", "elect", "fence", "mbarrier", "named_barrier", "setmaxnreg", "smem",
           "stmatrix", "tma", "warp", "wgmma")
BARRIER = """
uint64_t* const barrier = (uint64_t*)(dyn_smem() + 512);
if (t == 0) { mbarrier_init(barrier, 1); fence_mbarrier_init(); }
sync_block();
"""
LOAD = BARRIER + """
if (t == 0) { mbarrier_arrive_expect_tx(barrier, 256); bulk_load(shared, p.x, 256, barrier); }
"""
MAP = TensorMapSpec("x", "f32", (8, 8), (32,), (4, 8), 0)  # a box of 128 bytes
WRITTEN_MAP = TensorMapSpec("out", "f32", (8, 8), (32,), (4, 8), 0)
STORED = """
shared[t] = t;
fence_proxy_async_shared();
sync_block();
"""
MAPPED = BARRIER + "if (t == 0) mbarrier_arrive_expect_tx(barrier, 128);\n"
PRODUCT = """
float d[32];
for (int i = 0; i < 32; ++i) d[i] = 0.0f;
for (int i = t; i < 4096; i += 128) shared[i] = 0;
fence_proxy_async_shared();
sync_block();
const uint64_t a = wgmma_descriptor(shared, SWIZZLE_NONE, 128, 256);
"""
CALL = "wgmma_ss<64, K_MAJOR, K_MAJOR>(bf16{}, d, a, a, 1);\n"

# name: (kinds, body, what the case has beside it)
MISUSES: dict[str, tuple[str, str, dict]] = {
    # named barriers
    "a second arrival": (
        "barrier",
        "bar_arrive<1, 128>();\n"
        "bar_arrive<1, 128>();", {}),
    "counts that differ": (
        "barrier",
        "if (t < 32) bar_sync<1, 64>();\n"
        "else bar_sync<1, 96>();", {}),
    "arrivals left over": (
        "barrier",
        "bar_arrive<1, 96>();", {}),
    "barrier 16": (
        "argument",
        "bar_sync_at<64>(16);", {}),
    # mbarriers
    "arrival at no mbarrier": (
        "barrier",
        "mbarrier_arrive((uint64_t*)shared);", {}),
    "arrival beyond the count": (
        "barrier",
        BARRIER + "mbarrier_arrive(barrier);\n"
        "if (t == 0) mbarrier_arrive(barrier);\n"
        "if (t == 0) mbarrier_arrive_expect_tx(barrier, 16);\n"
        "mbarrier_arrive(barrier);", {}),
    "init twice": (
        "barrier",
        BARRIER + "if (t == 0) mbarrier_init(barrier, 1);", {}),
    "overwritten mbarrier": (
        "barrier",
        BARRIER + "if (t == 3) *barrier = 7;", {}),
    "init without a barrier": (
        "race",
        "uint64_t* const barrier = (uint64_t*)shared;\n"
        "if (t == 0) mbarrier_init(barrier, 64);\n"
        "any_in_warp(true);\n"
        "if (t < 32) mbarrier_arrive(barrier);", {}),
    "wait that nothing ends": (
        "deadlock",
        BARRIER + "mbarrier_wait_parity(barrier, 0);", {}),
    "poll that nothing ends": (
        "deadlock",
        BARRIER + "while (!mbarrier_try_wait_parity(barrier, 0)) {}", {}),
    # bulk copies
    "read before the load": (
        "in_flight|race",
        LOAD + "sync_block();\n"
        "p.out[t] = shared[t];", {}),
    "read without waiting": (
        "race",
        LOAD + "if (t == 0) mbarrier_wait_parity(barrier, 0);\n"
        "any_in_warp(true);\n"
        "if (t == 1) p.out[t] = shared[t];", {}),
    "load over what is read": (
        "race|deadlock",
        LOAD + "mbarrier_wait_parity(barrier, 0);\n"
        "p.out[t] = shared[t];\n"
        "if (t == 0) { mbarrier_arrive_expect_tx(barrier, 256); bulk_load(shared, p.x, 256, barrier); }\n"
        "mbarrier_wait_parity(barrier, 1);", {}),
    "end before the load": (
        "unwaited",
        LOAD, {}),
    "load of 8 bytes": (
        "argument",
        BARRIER + "if (t == 0) bulk_load(shared, p.x, 8, barrier);", {}),
    "load past the tensor": (
        "out_of_bounds",
        BARRIER + "if (t == 0) { mbarrier_arrive_expect_tx(barrier, 272);\n"
        "bulk_load(shared, p.x, 272, barrier); }\n"
        "mbarrier_wait_parity(barrier, 0);", {}),
    "load to an odd place": (
        "misaligned",
        BARRIER + "if (t == 0) bulk_load(shared + 1, p.x, 16, barrier);", {}),
    "store without a proxy fence": (
        "unfenced",
        "shared[t] = t;\n"
        "sync_block();\n"
        "if (t == 0) { bulk_store(p.out, shared, 256); bulk_commit(); bulk_wait<0>(); }", {}),
    "store overwritten while read": (
        "race",
        "shared[t] = t;\n"
        "fence_proxy_async_shared();\n"
        "sync_block();\n"
        "if (t == 0) { bulk_store(p.out, shared, 256); bulk_commit(); }\n"
        "sync_block();\n"
        "shared[t] = 0;\n"
        "if (t == 0) bulk_wait<0>();", {}),
    "tensor store that starts before the tensor": (
        "argument",
        STORED + "if (t == 0) { tma_store_2d(&p.map, shared, 0, -3); bulk_commit(); bulk_wait<0>(); }",
        {"maps": {"map": WRITTEN_MAP}}),
    "tensor sum that starts before the tensor": (
        "argument",
        STORED + "if (t == 0) { tma_reduce_add_2d(&p.map, shared, -4, 7); bulk_commit(); bulk_wait<0>(); }",
        {"maps": {"map": WRITTEN_MAP}}),
    "store not committed": (
        "unwaited",
        "shared[t] = t;\n"
        "fence_proxy_async_shared();\n"
        "sync_block();\n"
        "if (t == 0) { bulk_store(p.out, shared, 256); bulk_wait<0>(); }", {}),
    "result read too early": (
        "race",
        "shared[t] = t;\n"
        "fence_proxy_async_shared();\n"
        "sync_block();\n"
        "if (t == 0) {\n"
        "bulk_store(p.out, shared, 256); bulk_commit(); bulk_wait_read<0>(); }\n"
        "sync_block();\n"
        "if (t == 40) p.out[t] = 1;", {}),
    # tensor copies
    "map of another rank": (
        "argument",
        MAPPED + "if (t == 0) tma_load_3d(shared, &p.map, barrier, 0, 0, 0);",
        {"maps": {"map": MAP}}),
    "box beyond shared memory": (
        "out_of_bounds",
        MAPPED + "if (t == 0) tma_load_2d(shared + 224, &p.map, barrier, 0, 0);",
        {"maps": {"map": MAP}, "smem": 960}),
    "box at an odd place": (
        "misaligned",
        MAPPED + "if (t == 0) tma_load_2d(shared + 16, &p.map, barrier, 0, 0);",
        {"maps": {"map": MAP}}),
    "too few bytes expected": (
        "unwaited",
        BARRIER + "if (t == 0) { mbarrier_arrive_expect_tx(barrier, 112);\n"
        "tma_load_2d(shared, &p.map, barrier, 0, 0); }",
        {"maps": {"map": MAP}}),
    "multicast to a block that is not": (
        "argument",
        MAPPED + "if (t == 0) tma_load_2d_multicast(shared, &p.map, barrier, 4, 0, 0);",
        {"maps": {"map": MAP}, "blocks": 2, "cluster": 2}),
    # clusters
    "neighbour's memory before it is written": (
        "race|uninitialised",
        "shared[t] = t;\n"
        "p.out[0] = mapa(shared, cluster_ctarank() ^ 1)[t];\n"
        "cluster_sync();",
        {"blocks": 2, "cluster": 2}),
    "neighbour's memory after a relaxed arrival": (
        "race",
        "shared[t] = t;\n"
        "cluster_arrive_relaxed();\n"
        "cluster_wait();\n"
        "const uint32_t there = mapa(shared, cluster_ctarank() ^ 1)[t];\n"
        "cluster_sync();\n"
        "if (there == 99) p.out[t] = 1;",
        {"blocks": 2, "cluster": 2}),
    "two arrivals at the cluster": (
        "barrier",
        "cluster_arrive();\n"
        "cluster_arrive();",
        {"blocks": 2, "cluster": 2}),
    "wait of the cluster alone": (
        "barrier",
        "cluster_wait();",
        {"blocks": 2, "cluster": 2}),
    "block 2 of 2": (
        "argument",
        "p.out[t] = *mapa(shared, 2);",
        {"blocks": 2, "cluster": 2}),
    # wgmma
    "product not waited for": (
        "unwaited",
        PRODUCT + "wgmma_fence(d);\n" + CALL + "wgmma_commit();",
        {"threads": 128}),
    "product not committed": (
        "registers",
        PRODUCT + "wgmma_fence(d);\n" + CALL + "wgmma_wait<0>(d);",
        {"threads": 128}),
    "accumulators read in flight": (
        "registers",
        PRODUCT + "wgmma_fence(d);\n" + CALL + "wgmma_commit();\n"
        "if (d[t % 32] == 3.0f) p.out[0] = 1;\n"
        "wgmma_wait<0>(d);",
        {"threads": 128}),
    "accumulators not fenced": (
        "registers",
        PRODUCT + CALL,
        {"threads": 128}),
    "threads that disagree": (
        "collective",
        PRODUCT + "wgmma_fence(d);\n"
        "wgmma_ss<64, K_MAJOR, K_MAJOR>(bf16{}, d, a, a, t != 7);\n"
        "wgmma_commit();\n"
        "wgmma_wait<0>(d);",
        {"threads": 128}),
    "reserved bit of a descriptor": (
        "argument",
        PRODUCT + "wgmma_fence(d);\n"
        "wgmma_ss<64, K_MAJOR, K_MAJOR>(bf16{}, d, a | 1ull << 55, a, 1);",
        {"threads": 128}),
    "operand beyond shared memory": (
        "out_of_bounds",
        PRODUCT + "wgmma_fence(d);\n"
        "wgmma_ss<64, K_MAJOR, K_MAJOR>(bf16{}, d, wgmma_descriptor(shared, SWIZZLE_NONE, 128, 16384), a, 1);\n"
        "wgmma_commit();\n"
        "wgmma_wait<0>(d);",
        {"threads": 128}),
    "half a warpgroup": (
        "collective",
        "float d[32];\n"
        "wgmma_fence(d);\n"
        "wgmma_ss<64, K_MAJOR, K_MAJOR>(bf16{}, d, 0, 0, 0);", {}),
    # registers, fragments
    "more registers given up than held": (
        "argument",
        "setmaxnreg_dec<256>();",
        {"threads": 384}),
    "fewer registers asked than held": (
        "argument",
        "setmaxnreg_inc<24>();",
        {"threads": 128}),
    "stmatrix to an odd row": (
        "misaligned",
        "const uint32_t r[4] = {t, t, t, t};\n"
        "if (t < 32) stmatrix_x4(shared + 2 * t, r);", {}),
    # between blocks
    "flag without release": (
        "race",
        "if (blockIdx.x == 0) { if (t == 0) { p.out[1] = 7; atom_add_relaxed((int*)p.out, 1); } }\n"
        "else if (t == 0) { wait_until_equal((int*)p.out, 1); p.out[2] = p.out[1]; }",
        {"blocks": 2}),
    "flag by a plain store": (
        "race",
        "if (t == 0 && blockIdx.x == 0) p.out[0] = 1;\n"
        "if (t == 0 && blockIdx.x == 1) p.out[1] = ld_acquire((int*)p.out);",
        {"blocks": 2}),
    "semaphore that nobody raises": (
        "deadlock",
        "if (t == 0) wait_until_equal((int*)p.out, 5);",
        {"blocks": 3}),
    "poll of a semaphore that nobody raises": (
        "deadlock",
        "if (t == 0) while (ld_acquire((int*)p.out) != 5) {}", {"blocks": 3}),
    "sum and store without order": (
        "race",
        "if (blockIdx.x == 0) red_add_f32((float*)p.out, 1.0f);\n"
        "else p.out[0] = 1;",
        {"blocks": 2}),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse(name: str) -> None:
    kind, body, more = MISUSES[name]
    if "wgmma" in body:
        more = {"smem": 16384, "shapes": (WgmmaShape("bf16", 64),), **more}
    for policy in POLICIES:
        error = fault_of(small_case("misuse", body, HEADERS, **{"hopper": True, **more}), Schedule(policy))
        assert error.kind in kind.split("|"), f"{policy}: {error}"
