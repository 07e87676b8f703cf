"""Tensor maps, counters and partials: their arguments, their place in the parameter block, and a kernel that uses them
on the emulator."""
from __future__ import annotations

import struct
import threading

import pytest
import torch
from cuda.bindings import driver
from tensor_map_kit import WatchedDriver, fa3_like, fa3_like_source, program_for, step_of, watch, watched_kernel

from flashgen.codegen.plan import Param, Plan, params_layout
from flashgen.codegen.program import Buffer, Program, Step
from flashgen.errors import PlanError, VerifyError
from flashgen.runtime.emulator.kernel import EmulatedKernel, emulated_sms
from flashgen.runtime.emulator.program import EmulatedProgram
from flashgen.runtime.emulator.report import KernelFault
from flashgen.runtime.launch import counters as module
from flashgen.runtime.launch.counters import PER_THREAD_STREAM, SLOTS_PER_BLOCK, Counters, counters_of
from flashgen.runtime.launch.driver import adopt_context
from flashgen.runtime.launch.kernel import Launcher
from flashgen.runtime.launch.program import BoundProgram
from flashgen.runtime.launch.tensor_map import fits_maps, map_shapes


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> WatchedDriver:
    return watch(monkeypatch)


def bits(*shape: int) -> torch.Tensor:
    return torch.randint(0, 2**15, shape, dtype=torch.int16)


# ---- what a map describes

def test_dense_maps() -> None:
    q, k, v, out = bits(3, 50, 6, 64), bits(3, 70, 2, 64), bits(3, 70, 2, 40), bits(3, 50, 6, 40)
    plan = fa3_like(head_dim_v=40)
    found = {shape.name: shape for shape in map_shapes(plan, step_of(plan, q, k, v, out, 3).values)}
    assert found["q_map"].dims == (64, 50, 6, 3) and found["q_map"].strides == (768, 128, 38400)
    assert found["k_map"].dims == (64, 70, 2, 3) and found["k_map"].strides == (256, 128, 17920)
    assert found["v_map"].dims == (40, 70, 2, 3) and found["v_map"].strides == (160, 80, 11200)
    assert {shape.box for shape in found.values()} == {(64, 16, 1, 1)}
    assert {(s.swizzle_bytes, s.element_bytes, s.tensor) for s in found.values()} == {(128, 2, t) for t in "qkv"}


def test_strided_maps() -> None:
    q = bits(2, 6, 50, 64).transpose(1, 2)           # heads before rows
    k, v = bits(2, 70, 2, 2, 64).unbind(2)           # beside each other
    plan = fa3_like()
    q_map, k_map, v_map = map_shapes(plan, step_of(plan, q, k, v, bits(2, 50, 6, 64), 2).values)
    assert q_map.strides == (128, 6400, 38400) and k_map.strides == v_map.strides == (512, 128, 35840)


def test_varlen_maps_have_one_sequence() -> None:
    q, k = bits(50, 6, 64), bits(70, 2, 64)
    plan = fa3_like(kv_layout="varlen")
    q_map, k_map, _ = map_shapes(plan, step_of(plan, q, k, k, q, 5).values)
    assert q_map.dims == (64, 50, 6, 1) and q_map.strides == (768, 128, 128)
    assert k_map.dims == (64, 70, 2, 1) and k_map.strides == (256, 128, 128)


def test_dimensions_of_one_get_legal_strides() -> None:
    plan = fa3_like()
    odd = bits(64).as_strided((1, 1, 1, 64), (0, 1, 3, 1))  # strides of size-1 dimensions mean nothing
    for shape in map_shapes(plan, step_of(plan, odd, odd, odd, odd, 1).values):
        assert shape.dims == (64, 1, 1, 1) and shape.strides == (128, 128, 128)


@pytest.mark.parametrize("shape, strides, fits", [
    ((2, 50, 6, 64), (19200, 384, 64, 1), True),
    ((2, 50, 6, 64), (0, 384, 64, 1), False),              # expanded over the batch
    ((2, 50, 6, 64), (3200, 64, 0, 1), False),             # over the heads
    ((1, 50, 6, 64), (0, 384, 64, 1), True),               # a batch of one
    ((50, 6, 64), (384, 64, 1), True),
    ((50, 6, 64), (32, 1600, 1), False),                   # rows that overlap
    ((2, 1, 1, 64), (2**39, 64, 64, 1), False),            # 2^40 bytes
    ((2, 1, 1, 64), (2**39 - 8, 64, 64, 1), True),
    ((2, 0, 1, 64), (0, 0, 0, 1), True),                   # nothing to read
])
def test_which_tensors_fit(shape: tuple[int, ...], strides: tuple[int, ...], fits: bool) -> None:
    assert fits_maps(shape, strides, 2) is fits


# ---- the parameter block

def test_a_launcher_keeps_its_maps_up_to_date(watched: WatchedDriver) -> None:
    plan = fa3_like()
    q, k = bits(2, 50, 6, 64), bits(2, 70, 2, 64)
    step = step_of(plan, q, k, k, q, 2)
    launcher, offsets = Launcher(watched_kernel(plan, watched), step, plan.pointers), params_layout(plan.params)[1]
    pointers = [4096, 8192, 12288, 16384, 20480, 0]
    for moved in (None, None, 1, 2, 3):
        if moved is not None:
            pointers[moved] += 1 << 20
        launcher(0, pointers)
        block = watched.launches[-1]
        maps = [struct.unpack_from("<16Q", block, offsets[f"{t}_map"]) for t in "qkv"]
        assert [row[0] for row in maps] == pointers[:3] and all(row[1:] == tuple(range(16, 136, 8)) for row in maps)
        assert list(struct.unpack_from("<6Q", block, offsets["q"])) == pointers
        assert struct.unpack_from("<i", block, offsets["num_tiles"]) == (step.values["num_tiles"],)
        assert struct.unpack_from("<q", block, offsets["k_row_stride"]) == (128,)
    assert len(watched.encoded) == 3 and [address for _, address in watched.replaced] == [8192 + 2**20, 12288 + 2**20]
    _, rank, address, dims, strides, box, steps, *_ = watched.encoded[1]
    assert (rank, address) == (4, 8192) and [int(x) for x in dims] == [64, 70, 2, 2]
    assert [int(x) for x in strides] == [256, 128, 17920] and [int(x) for x in box] == [64, 16, 1, 1]
    assert [int(x) for x in steps] == [1, 1, 1, 1]
    names = [value.name for value in (watched.encoded[1][0], *watched.encoded[1][7:])]
    for name, word in zip(names, ("BFLOAT16", "INTERLEAVE_NONE", "SWIZZLE_128B", "L2_128B", "FILL_NONE"), strict=True):
        assert name.endswith(word)


def test_a_refused_address_is_tried_again(watched: WatchedDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch after a failed one must not believe that the maps hold what they were asked to hold."""
    from flashgen.errors import DriverError

    plan, q = fa3_like(), bits(2, 50, 2, 64)
    launcher = Launcher(watched_kernel(plan, watched), step_of(plan, q, q, q, q, 2), plan.pointers)
    launcher(0, [4096, 8192, 12288, 16384, 20480, 0])
    good = launcher._replace
    monkeypatch.setattr(watched, "cuGetErrorString", lambda status: (0, b"no"), raising=False)
    monkeypatch.setattr(launcher, "_replace", lambda *_: (watched.CUresult.CUDA_ERROR_INVALID_VALUE,))
    with pytest.raises(DriverError, match=r"tensor map k_map of fa3_like\.sm_90a"):
        launcher(0, [4096, 8208, 12288, 16384, 20480, 0])
    monkeypatch.setattr(launcher, "_replace", good)
    launcher(0, [4096, 8208, 12288, 16384, 20480, 0])
    assert struct.unpack_from("<Q", watched.launches[-1], 128) == (8208,)


def test_blocks_that_wait_for_each_other_are_launched_together(watched: WatchedDriver) -> None:
    plan, q = fa3_like(), bits(1, 20, 5, 64)
    for keys, cooperative in ((1, False), (2000, True)):
        k = bits(1, keys, 5, 64)
        step = step_of(plan, q, k, k, q, 1, num_sms=64)
        assert step.cooperative is cooperative
        config = Launcher(watched_kernel(plan, watched), step, plan.pointers)._config
        assert [(a.id.name, a.value.cooperative) for a in config.attrs] == [
            ("CU_LAUNCH_ATTRIBUTE_COOPERATIVE", 1)] * cooperative and config.numAttrs == cooperative


@pytest.mark.parametrize("before, after", [(0, 5), (3, 3)], ids=["none", "its own"])
def test_a_thread_without_a_context_gets_torchs(before: int, after: int, watched: WatchedDriver) -> None:
    watched.context = driver.CUcontext(before)
    adopt_context(0)
    assert int(watched.context) == after


def test_a_plan_without_maps_is_packed_as_before(watched: WatchedDriver) -> None:
    from tiny import tiny_plan

    plan = tiny_plan()
    launcher = Launcher(watched_kernel(plan, watched), Step("fwd", 1, 32, {"n": 5}), plan.pointers)
    launcher(0, [4096, 8192])
    assert watched.launches == [struct.pack("<QQi4x", 4096, 8192, 5)] and not watched.encoded


# ---- counters and partials on a device

def test_slots_by_stream_and_by_capture(watched: WatchedDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = Counters()
    assert slots.slot_bytes == 4096
    first, second = slots.slot(0), slots.slot(1 << 40)
    assert first != second and (slots.slot(0), slots.slot(1 << 40)) == (first, second)
    monkeypatch.setattr(module, "_is_capturing", lambda: True)
    captured = {slots.slot(0) for _ in range(2 * SLOTS_PER_BLOCK)}
    assert len(captured) == 2 * SLOTS_PER_BLOCK and not captured & {first, second}
    assert all(slot % 4096 == 0 for slot in captured) and watched.allocated == [SLOTS_PER_BLOCK * 4096] * 3
    monkeypatch.setattr(module, "_is_capturing", lambda: False)
    assert slots.slot(0) == first


def test_threads_get_different_slots_for_their_own_default_streams(watched: WatchedDriver) -> None:
    slots, found = Counters(), list[int]()

    def ask() -> None:
        found.extend((slots.slot(PER_THREAD_STREAM), slots.slot(PER_THREAD_STREAM), slots.slot(9)))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    own, again, shared = found[::3], found[1::3], found[2::3]
    assert own == again and len({*own}) == 8 and len({*shared}) == 1 and not {*shared} & {*own}


DEVICE = torch.device("cpu", 0)  # whose memory stands for a device's


@pytest.mark.parametrize("keys", [None, 1, 2000])
def test_buffers_have_the_places_of_their_names(keys: int | None, watched: WatchedDriver) -> None:
    """Whatever the order of the call's tensors; partials are null where no keys are cut."""
    plan, q = fa3_like(partials=keys is not None), bits(1, 20, 5, 64)
    k = bits(1, keys or 2000, 5, 64)
    program = program_for(plan, q, k, k, q, 1, num_sms=64)
    launch = BoundProgram(program, {"fwd": watched_kernel(plan, watched)}, ("out", "v", "lse", "k", "q"), DEVICE)
    launch(5, [16384, 12288, 24576, 8192, 4096])
    offsets, block = params_layout(plan.params)[1], watched.launches[0]
    slot = counters_of(0, program.buffer("counters").size).slot(5)
    assert struct.unpack_from("<5Q", block, offsets["q"]) == (4096, 8192, 12288, 16384, slot)
    if keys is not None:
        assert bool(struct.unpack_from("<Q", block, offsets["partials"])[0]) is (keys > 1)


def two_steps() -> Program:
    """`first` writes what `second` reads, unless the caller gives it."""
    return Program((Step("first", 1, 32, {"n": 1}, unless="kept"), Step("second", 1, 32, {"n": 2})),
                   (Buffer("kept", "i32", (4, 2)), Buffer("sums", "f32", (3,), "zeroed")))


def plan_with(name: str, *pointers: str) -> Plan:
    from tiny import tiny_plan

    return tiny_plan(name, params=(*(Param(p, "f32_out", "") for p in pointers), Param("n", "i32", "")))


def test_steps_share_buffers_and_have_fresh_ones_in_each_call(watched: WatchedDriver) -> None:
    plans = {"first": plan_with("first", "kept", "a"), "second": plan_with("second", "a", "sums", "kept")}
    kernels = {name: watched_kernel(plan, watched) for name, plan in plans.items()}
    watched.params_bytes = 32
    launch = BoundProgram(two_steps(), kernels, ["a"], DEVICE)
    launch(0, [4096])
    first, second = (struct.unpack_from(form, block) for form, block in
                     zip(("<2Qi", "<3Qi"), watched.launches, strict=True))
    assert first[1:] == (4096, 1) and (second[0], second[3]) == (4096, 2) and first[0] == second[2] != second[1]


def test_a_step_is_left_out_where_its_result_is_given(watched: WatchedDriver) -> None:
    kernels = {"second": watched_kernel(plan_with("second", "kept"), watched)}
    left = two_steps().given({"kept"})
    assert [step.kernel for step in left.steps] == ["second"] and [b.name for b in left.buffers] == ["sums"]
    BoundProgram(left, kernels, ["kept"], DEVICE)(0, [4096])
    assert struct.unpack_from("<Qi", watched.launches[0]) == (4096, 2) and len(watched.launches) == 1


def test_a_pointer_that_nobody_gives_is_refused_by_name(watched: WatchedDriver) -> None:
    kernels = {name: watched_kernel(plan_with(name, "kept", "odd"), watched) for name in ("first", "second")}
    with pytest.raises(PlanError, match=r"(?s)pointer odd.*allowed: q, kept, sums"):
        BoundProgram(two_steps(), kernels, ["q"], DEVICE)


# ---- on the emulator

def solve(plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, reset: str | None = None) -> torch.Tensor:
    kernel = EmulatedKernel(plan, fa3_like_source(plan) if reset is None else fa3_like_source(plan, reset))
    out = torch.zeros_like(q)
    program = program_for(plan, q, k, v, out, q.shape[0], kernel.num_sms)
    EmulatedProgram(program, {"fwd": kernel})({"q": q, "k": k, "v": v, "out": out})
    return out


@pytest.mark.parametrize("sms", [1, 3, 4, 64])
def test_an_emulated_kernel_with_maps_and_counters(sms: int) -> None:
    """Two sequences, query heads that share keys, ragged rows, heads before rows; blocks with several tiles."""
    q, k = bits(2, 37, 4, 64), bits(2, 2, 37, 64).transpose(1, 2)
    v = bits(2, 37, 3, 2, 64)[:, :, 1]
    with emulated_sms(sms):
        out = solve(fa3_like(), q, k, v)
    assert torch.equal(out, q ^ k.repeat_interleave(2, 2) ^ v.repeat_interleave(2, 2))


def test_the_kernel_compiles_for_a_device() -> None:
    """What tests/gpu/test_gpu_counters.py launches."""
    pytest.importorskip("cuda.bindings.nvrtc")
    from flashgen.runtime.compile.nvrtc import compile_source

    plan = fa3_like()
    assert compile_source(fa3_like_source(plan), plan=plan).image


def test_rows_past_the_keys_are_zero() -> None:
    q, k = bits(1, 40, 1, 64), bits(1, 21, 1, 64)
    out = solve(fa3_like(), q, k, k)
    assert torch.equal(out, q)  # where both are there they cancel, and past the end both are zero


def test_a_counter_left_behind_is_reported() -> None:
    q = bits(1, 20, 2, 64)
    with pytest.raises(VerifyError, match=r"(?s)fa3_like\.sm_90a.*leaves counter 1 of 7 at 4.*replay: policy"):
        solve(fa3_like(), q, q, q, reset=";")


def test_counters_end_where_they_should() -> None:
    """3 and a word per SM, and no more."""
    q = bits(1, 20, 2, 64)
    with pytest.raises(KernelFault, match="counters"):
        solve(fa3_like(), q, q, q, reset="p.counters[7] = 0;")
