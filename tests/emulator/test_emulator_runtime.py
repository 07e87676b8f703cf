"""The way into the emulator and out of it: calls on CPU tensors, reports, kernels that hang or crash, the cache."""
from __future__ import annotations

import logging
import re
from typing import Any

import numpy as np
import pytest
import torch
from emulator_kit import changed, fault_of, problems_of, replaced, run_case, shipped, small_case, solve

import flashgen
from flashgen.codegen.families.registry import lower
from flashgen.codegen.render import render
from flashgen.errors import CompileError, EnvironmentError_, UnsupportedError, VerifyError
from flashgen.runtime.emulator import client, kernel, objects, toolchain
from flashgen.runtime.emulator.kernel import EmulatedKernel
from flashgen.runtime.emulator.report import KernelFault
from flashgen.runtime.emulator.schedule import Schedule, collecting, scheduled

SPEC = shipped("fa2_fwd_bf16_d64_causal")


# ---- calls

def test_attention_on_cpu_tensors(caplog: pytest.LogCaptureFixture) -> None:
    """The public call and the torch ops behind it, without a GPU; one line says that this is slow."""
    kernel._say_once.cache_clear()
    kernel._local.__dict__.clear()
    q, k, v = (torch.randn(1, 40, 2, 64, dtype=torch.float16) for _ in range(3))
    with caplog.at_level(logging.INFO, "flashgen"):
        out, lse = flashgen.attention(q, k, v, causal=True, return_lse=True)
        flashgen.attention(q, k, v)
    assert sum("emulator" in record.message for record in caplog.records) == 1
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(t.double().transpose(1, 2) for t in (q, k, v)), is_causal=True).transpose(1, 2)
    assert (out - expected).abs().max() < 2e-3 and lse.shape == (1, 2, 40)
    op = torch.ops.flashgen.attention(q, k, v, None, None, 1, -1, -1, 0.125, "")
    assert torch.equal(op, out)


def test_tensors_need_not_be_contiguous() -> None:
    packed = torch.randn(2, 33, 3, 2, 64, dtype=torch.bfloat16)
    q, k, v = packed.unbind(2)
    whole = torch.full((2, 33, 4, 64), 7.0, dtype=torch.bfloat16)
    out = whole[:, :, ::2]
    flashgen.attention(q, k, v, out=out)
    assert torch.equal(out, flashgen.attention(q.contiguous(), k.contiguous(), v.contiguous()))
    assert (whole[:, :, 1::2] == 7.0).all()


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_kv"])
@pytest.mark.parametrize(("sums", "wrong"), [
    ([0, 12, 5, 20], "2] is 5 after 12"), ([0, 12, 20, 40], "3] is 40 after 20"), ([3, 12, 15, 20], "0] is 3"),
    ([-3, 12, 15, 20], "0] is -3"), ([0, -1, 5, 20], "1] is -1 after 0")])
def test_sums_of_lengths_are_looked_at_here(name: str, sums: list[int], wrong: str) -> None:
    """The caller's mistake is not told as a race of the kernel's."""
    x = torch.randn(20, 1, 64, dtype=torch.bfloat16)
    good = {key: torch.tensor([0, 5, 9, 18], dtype=torch.int32) for key in ("cu_seqlens_q", "cu_seqlens_kv")}
    flashgen.attention(x, x, x, **good)
    with pytest.raises(UnsupportedError, match=re.escape(f"{name}[{wrong}")) as caught:
        flashgen.attention(x, x, x, **{**good, name: torch.tensor(sums, dtype=torch.int32)})
    assert "at most 20" in caught.value.allowed


def test_a_schedule_replays() -> None:
    """The same schedule takes the same steps, another seed takes others."""
    inputs = problems_of(SPEC)[0].make_inputs()
    with collecting() as rows:
        for seed in (1, 1, 2):
            solve(SPEC, inputs, Schedule("random", seed))
    assert rows[0].switches == rows[1].switches != rows[2].switches


def test_flashgen_device_brings_tensors_here_and_back() -> None:
    """What FLASHGEN_DEVICE=cpu does with CUDA tensors, tried with tensors that are here already."""
    from flashgen.runtime.ops.attention.call import OPERATION
    from flashgen.runtime.ops.front import on_cpu

    q, k, v = (torch.randn(1, 40, 2, 64, dtype=torch.float16) for _ in range(3))
    out, given = flashgen.attention(q, k, v), torch.empty(1, 40, 2, 64, dtype=torch.float16)
    call = (q, k, v, None, None), (0, -1, -1, None, "", (), ()), ()
    result, none = on_cpu(OPERATION, *call, given, False)
    assert result.data_ptr() == given.data_ptr() and torch.equal(given, out) and none is None
    again, lse = on_cpu(OPERATION, *call, None, True)
    assert torch.equal(again, out) and lse is not None and lse.shape == (1, 2, 40)


# ---- reports

def test_a_report_names_line_thread_stage_and_seed() -> None:
    source = render(lower(SPEC))
    barrier = "sync_block();  // the tile is there"
    lines = source.text.splitlines()
    faulty = changed(source, "kernel", lambda text: text.replace(barrier, "; // the tile is there"))
    with replaced(EmulatedKernel(lower(SPEC), faulty)), pytest.raises(KernelFault) as caught:
        solve(SPEC, problems_of(SPEC)[0].make_inputs(), Schedule("random", 7))
    error = caught.value
    line = int(error.where.partition(":")[2].partition(" ")[0])
    assert error.where.startswith(f"{SPEC.variant}.sm_90.cu:")
    assert "gemm_" in lines[line - 1] or "load" in lines[line - 1]
    text = str(error)
    assert "role mma" in text and "policy random, seed 7" in text and "stage" in text and "warp" in text


@pytest.mark.parametrize("kind, body", {
    "uninitialised": "p.out[t] = shared[t];",
    "in_flight": "cp_async_16(shared + 4 * t, p.x);\ncp_async_commit();\np.out[t] = shared[4 * t];",
    "unwaited": "if (t == 0) cp_async_16(shared, p.x);",
    "out_of_bounds": "if (t == 3) p.out[64] = 1;",
    "read_only": "const_cast<uint32_t*>(p.x)[t] = 1;",
    "misaligned": "cp_async_16(shared + 4 * t + 1, p.x);",
    "wild": "*reinterpret_cast<volatile uint32_t*>(4096ull) = 1;",
    "argument": "if (t == 0) cp_async_16_zfill(shared, p.x, 8);",
    "collective": "if (t % 2) shfl_xor(1.0f, 1);\nelse any_in_warp(true);",
    "deadlock": "if (t < 63) sync_block();",
}.items())
def test_each_kind_of_fault(kind: str, body: str) -> None:
    for policy in ("eager", "lazy", "random"):
        error = fault_of(small_case(f"fault_{kind}", body), Schedule(policy))
        assert error.kind == kind, error


@pytest.mark.parametrize("body", [
    "p.out[0] = t;",                                                            # two threads of a block
    "if (t == 0) p.out[0] = blockIdx.x;",                                       # two blocks
    "if (t < 32) shared[t] = t;\nif (t >= 32) p.out[t] = shared[t - 32];",      # two warps
    "if (t == 0) shared[0] = 1;\nany_in_warp(true);\nif (t == 1) p.out[1] = shared[0];",  # a vote orders no memory
])
def test_races(body: str) -> None:
    assert fault_of(small_case("race", body, blocks=3)).kind == "race"


def test_a_deadlock_says_who_waits() -> None:
    text = str(fault_of(small_case("deadlock", "if (t < 63) sync_block();\nelse { shfl_xor(1.0f, 1); }")))
    assert "63 threads, the first thread 0" in text and "barrier 0 (63 of 64 arrived)" in text
    assert "1 threads, the first thread 63" in text and "(1 of 32 arrived)" in text


def test_bank_conflicts_are_counted() -> None:
    """A column of a matrix with rows of 128 bytes lies in one bank; with a swizzle it does not."""
    inputs = {"x": np.arange(64, dtype=np.uint32), "out": np.zeros(64, np.uint32)}
    for body, wavefronts in (("if (t < 8) shared[t * 32] = t;", 8),
                             ("if (t < 8) shared[t * 32 + t] = t;", 1)):
        _, statistics = run_case(small_case("banks", body), inputs, Schedule())
        (counted,) = statistics.bank_conflicts().values()
        assert counted == (1, wavefronts, 1)


def test_shipped_kernels_have_no_bank_conflicts() -> None:
    """And the swizzle is why: with half of it, they have."""
    source = render(lower(SPEC))
    found = []
    for subject in (source, changed(source, "tile.cuh", lambda text: text.replace("row & 7 :", "row & 3 :"))):
        with collecting() as statistics, replaced(EmulatedKernel(lower(SPEC), subject)):
            solve(SPEC, problems_of(SPEC)[0].make_inputs(), Schedule())
        found.append(sum(wavefronts - ideal for _, _, wavefronts, ideal in statistics[0].banks))
    assert found[0] == 0 < found[1]


# ---- kernels that take their process with them

def test_a_spin_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "STALL_S", 1.0)
    spin = small_case("spin", "volatile uint32_t x = 1;\nwhile (x) {}")
    with pytest.raises(VerifyError, match=r"(?s)spins.*policy random, seed 5"):
        run_case(spin, spin.inputs(np.random.default_rng(0)), Schedule(seed=5))
    test_bank_conflicts_are_counted()  # a new process serves the next launch


def test_a_crash_is_reported() -> None:
    crash = small_case("crash", "__builtin_trap();")
    with pytest.raises(VerifyError, match=r"SIGILL|SIGTRAP|SIGABRT"):
        run_case(crash, crash.inputs(np.random.default_rng(0)), Schedule())
    test_bank_conflicts_are_counted()


# ---- compiling

def test_objects_are_cached_by_content(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "directory", lambda: tmp_path)
    source = small_case("cached", "p.out[t] = t;").source()
    first = toolchain.compile_kernel(source)
    stamp = first.stat().st_mtime_ns
    assert toolchain.compile_kernel(source) == first and first.stat().st_mtime_ns == stamp
    assert toolchain.compile_kernel(small_case("cached", "p.out[t] = 1;").source()) != first
    header = changed(source, "prelude.cuh", lambda text: text + "\n")
    assert toolchain.compile_kernel(header) != first


def test_a_text_that_does_not_compile(tmp_path: Any) -> None:
    with pytest.raises(CompileError, match=r"(?s)wrong\.cu.*'?nonsense'?"):
        toolchain.compile_kernel(small_case("wrong", "nonsense;").source())


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "COMPILERS", ())
    toolchain.compiler.cache_clear()
    try:
        with pytest.raises(EnvironmentError_, match=r"C\+\+ compiler"):
            toolchain.compiler()
    finally:
        toolchain.compiler.cache_clear()


def test_settings_end_with_their_context() -> None:
    from flashgen.runtime.emulator.schedule import current_schedule

    with scheduled(Schedule("lazy", 3)):
        assert current_schedule() == Schedule("lazy", 3)
    assert current_schedule() == Schedule()
