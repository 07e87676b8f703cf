"""Standard attention: three kernels in one program, what is refused, and bytes counted by hand."""
from __future__ import annotations

import dataclasses
import functools
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from tiny import tiny_plan, tiny_source
from torch._dynamo.testing import CompileCounterWithBackend

import flashgen
from flashgen.codegen.explain.check import check as check_spec
from flashgen.codegen.explain.explain import explain
from flashgen.codegen.families.registry import fastest_first, lower, pass_of, program_of
from flashgen.codegen.families.shared.launch import Sizes
from flashgen.codegen.families.standard.explain import StandardExplanation
from flashgen.codegen.families.standard.options import KERNELS
from flashgen.codegen.plan import Plan
from flashgen.codegen.program import Buffer, Program
from flashgen.codegen.spec.spec import Spec, load_specs, spec_path
from flashgen.errors import SpecError, UnsupportedError
from flashgen.runtime.compile.cache import Cache
from flashgen.runtime.measure.grid import default_grid
from flashgen.runtime.ops import front
from flashgen.runtime.ops.attention.bench import load_grid, variants_for
from flashgen.runtime.select import lookup
from flashgen.runtime.select.bundle import write_bundle
from flashgen.runtime.select.selector import Wanted

SHIPPED = load_specs(spec_path("standard")).specs
CALL = Spec(**{"name": "standard", "family": "standard", "pass": "fwd", "kernel": "scores", "arch": "sm_80",
               "dtype": "bf16", "head_dim_qk": 64})


def plans_of(spec: Spec) -> list[Plan]:
    return [lower(spec.with_(kernel=kernel)) for kernel in KERNELS]


def program(spec: Spec, sizes: Sizes, num_sms: int = 132) -> Program:
    first, *others = plans_of(spec)
    return program_of(first, sizes, num_sms, *others)


# ---- spec

def test_the_shipped_file_has_three_kernels_for_each_call() -> None:
    archs = {spec.arch for spec in SHIPPED}
    assert archs == {spec.arch for spec in load_specs(spec_path("fa2_fwd")).specs}
    assert len(SHIPPED) == 3 * 2 * 3 * 2 * len(archs)
    names = {spec.variant for spec in SHIPPED}
    assert names == {f"standard_{dtype}_d{dim}{mask}_{kernel}" for dtype, dim, mask, kernel in product(
        ("bf16", "fp16"), (64, 128, 256), ("", "_causal"), KERNELS)}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "window": ({"window": True}, "it computes all scores"),
    "kv_layout": ({"kv_layout": "varlen"}, "its score matrix is one for each sequence and head"),
    "score": ({"score": "2 * score"}, "it is the baseline"),
    "mask": ({"mask": "kv_pos <= q_pos"}, "it is the baseline"),
    "sink": ({"sink": "per_head"}, "it is the baseline"),
    "tile": ({"tile": {"m": 64, "n": 64}}, "it has one tile"),
    "stages": ({"stages": 3}, "it has one tile"),
    "head_dim_qk": ({"head_dim_qk": 576}, "head_dim_qk"),
    "kernel": ({"kernel": None}, "kernel is null with family standard"),
}


@pytest.mark.parametrize("field", REFUSED)
def test_what_is_refused(field: str) -> None:
    changes, reason = REFUSED[field]
    with pytest.raises(SpecError, match=reason) as caught:
        CALL.with_(**changes)
    assert caught.value.where == f"Spec.{field}" and caught.value.allowed


def test_other_families_have_no_field_kernel() -> None:
    with pytest.raises(SpecError, match="kernel"):
        Spec(**{**CALL.model_dump(by_alias=True), "family": "fa2"})


def test_no_call_gets_it_unasked() -> None:
    assert [family.name for family in fastest_first("attention")][-1] == "standard"
    assert "standard" not in {family.name for family in fastest_first("attention", emulated=True)}
    assert lookup.why(Wanted("bf16", 64, 64, False, False, "dense", True), 80).startswith("fa2: ")


@pytest.mark.parametrize("asked", [{"window": (3, 0)}, {"causal": True, "window": (3, -1)}], ids=str)
def test_calls_that_it_does_not_serve(asked: dict[str, Any]) -> None:
    q = torch.zeros(1, 9, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match="no variant of it serves"):
        flashgen.attention(q, q, q, spec="standard", **asked)


# ---- plans and launches

@pytest.mark.parametrize("spec", [s for s in SHIPPED if s.arch in ("sm_80", "sm_120") and s.dtype == "bf16"],
                         ids=lambda spec: f"{spec.variant}.{spec.arch}")
def test_plans_fit_and_survive_json(spec: Spec) -> None:
    plan = lower(spec)
    assert Plan.from_json(plan.to_json()) == plan and plan.step == spec.kernel
    pointers = {"scores": ["q", "k", "scores"], "softmax": ["scores", "probs", "lse"],
                "values": ["probs", "v", "out"]}
    assert [p.name for p in plan.params if p.ctype.endswith(("_ptr", "_out"))] == pointers[str(spec.kernel)]


@pytest.mark.parametrize(("seqlen_q", "seqlen_kv", "grids"), [
    (1, 1, (6, 1, 6)),                # one tile for each of 6 heads of the batch; 6 rows, a warp each
    (128, 64, (6, 96, 6)),
    (129, 65, (24, 97, 12)),          # 2 x 2 tiles, 774 rows
    (300, 1000, (3 * 16 * 6, 225, 18)),
])
def test_launch_grids(seqlen_q: int, seqlen_kv: int, grids: tuple[int, ...]) -> None:
    made = program(CALL, Sizes(2, seqlen_q, seqlen_kv, 3, 1, 0.5, strides=dict.fromkeys(
        (f"{t}_{axis}_stride" for t in ("q", "k", "v", "out") for axis in ("batch", "row", "head")), 8)))
    assert [(step.kernel, step.grid_x, step.threads) for step in made.steps] == [
        (name, grid, 256) for name, grid in zip(KERNELS, grids, strict=True)]
    shape = (2, 3, seqlen_q, -(-seqlen_kv // 64) * 64)
    assert made.buffers == (Buffer("scores", "f32", shape), Buffer("probs", "bf16", shape))


def test_a_grid_too_large_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"rows of scores") as caught:
        program(CALL, Sizes(2**16, 2**15, 64, 2, 1))
    assert caught.value.next == "split the batch"


# ---- explain

def test_bytes_by_hand() -> None:
    found = explain(CALL, batch=2, seqlen_q=100, seqlen_kv=130, num_heads_q=6, num_heads_kv=3)
    assert isinstance(found, StandardExplanation)
    rows, keys, columns = 2 * 6 * 100, 2 * 3 * 130, 192  # 130 keys are three key tiles of 64
    scores = found.moved["scores"], found.moved["softmax"], found.moved["values"]
    assert [(each.read, each.written) for each in scores] == [
        (2 * 64 * (rows + keys), 4 * rows * columns),
        (4 * rows * columns, 2 * rows * columns + 4 * rows),
        (2 * rows * columns + 2 * 64 * keys, 2 * 64 * rows)]
    assert [each.flops for each in scores] == [2 * rows * 130 * 64, 0, 2 * rows * 130 * 64]
    assert found.bytes_once == 2 * 64 * 2 * (rows + keys) + 4 * rows
    assert found.scratch_bytes == 6 * rows * columns


def test_explain_shows_a_whole_call_on_one_screen() -> None:
    found = explain("standard")
    lines = str(found).splitlines()
    assert len(lines) <= 50 and max(map(len, lines)) <= 120
    assert {*KERNELS, "all three", "scratch memory"} <= {line[2:].partition("  ")[0] for line in lines}
    assert set(found.to_json()["moved"]) == set(KERNELS)


# ---- calls

@pytest.fixture
def bundled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """From kernels of CALL to a front door that finds these in a bundle, for a device that is not there."""
    pytest.importorskip("cuda.bindings.nvrtc")
    plan = tiny_plan()
    entry = Cache(tmp_path / "cache").get_or_build(plan, tiny_source(plan))
    monkeypatch.setattr(lookup, "device_facts", lambda index: SimpleNamespace(cc=80, num_sms=108))
    monkeypatch.setattr(lookup, "loaded", lambda plan, image, index: SimpleNamespace(plan=plan))
    registry = lookup.Registry()
    monkeypatch.setattr(front, "kernel_for", lambda wanted, device, sizes=None: registry.kernel(wanted, 0))

    def load(*kernels: str) -> None:
        chosen = [dataclasses.replace(entry, plan=lower(CALL.with_(kernel=kernel))) for kernel in kernels]
        registry.load_bundle(write_bundle(chosen, tmp_path / "bundle"))
    return load


WANTED, SIZES = Wanted("bf16", 64, 64, False, False, "dense", True), Sizes(1, 9, 9, 2, 2)


def test_a_bundle_serves_all_three_kernels(bundled: Any) -> None:
    bundled(*KERNELS)
    with mock.patch.object(lookup, "choose", side_effect=AssertionError("a bundle serves it")):
        found = front.kernels_for(WANTED, torch.device("cuda", 0), SIZES)
    assert [kernel.plan.step for kernel in found] == list(KERNELS)


def test_a_bundle_without_one_of_the_kernels_is_an_error(bundled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel that is missing is no reason to take one of another family in its place."""
    bundled("scores", "values")
    other = SimpleNamespace(plan=lower(load_specs(spec_path("fa2_fwd")).specs[0]))
    monkeypatch.setattr(lookup, "_compiled", lambda spec, index: other)
    with pytest.raises(UnsupportedError, match=r"standard_bf16_d64_scores\.sm_80 .* without") as caught:
        front.kernels_for(WANTED, torch.device("cuda", 0), SIZES)
    assert "flashgen bundle" in caught.value.next


def test_the_kernels_of_a_call_come_from_one_pass() -> None:
    assert [dict(kernel)["kernel"] for kernel in pass_of(CALL).kernels] == list(KERNELS)


def test_bench_times_a_call_once() -> None:
    """And by default on the grid of its own, which the shipped file serves."""
    cases = load_grid(default_grid("standard", "fwd"))
    assert {case.head_dim_qk for case in cases} == {64, 128, 256}
    for case in cases:
        [spec] = variants_for(case, SHIPPED, ["sm_90a", "sm_90"], 132)
        assert spec.kernel == KERNELS[0] and spec.causal == case.causal


@pytest.mark.parametrize("kernel", KERNELS)
def test_check_draws_the_tiles_of_the_call(kernel: str) -> None:
    found = check_spec([spec for spec in SHIPPED if spec.kernel == kernel and spec.causal], seqlen_q=256)
    assert found.tiles is not None and len(found.tiles.cells) == 2  # query tiles of 128


def test_torch_compile_takes_the_call_as_one_graph() -> None:
    q = torch.randn(1, 20, 2, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    function = functools.partial(flashgen.attention, causal=True, return_lse=True, spec="standard")
    for eager, compiled in zip(function(q, q, q), torch.compile(function, backend=counter, fullgraph=True)(q, q, q),
                               strict=True):
        assert torch.equal(eager, compiled)
    assert counter.frame_count == 1
