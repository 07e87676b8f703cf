"""Kernels of Triton on the device: all shipped ones for it, gradients, bundles, and how often they are compiled."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from emulator_kit import with_nans_in_v
from kit import runs_here, verified

import flashgen
from flashgen.codegen.families.registry import lower
from flashgen.codegen.render import render
from flashgen.codegen.spec.spec import Spec, load_specs, spec_path, variant_spec_paths
from flashgen.runtime.compile.cache import Cache
from flashgen.runtime.launch.triton import _function
from flashgen.runtime.ops.attention.problem import Problem
from flashgen.runtime.select.lookup import registry
from flashgen.runtime.verify.compare import check_bits
from flashgen.runtime.verify.verify import verify_spec

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu
# Those of triton_bwd are in test_gpu_backward.py, with all other backward specs.
CALLS = [spec for spec in load_specs(spec_path("triton_fwd")).specs if runs_here(spec)]
VARIANTS = [spec for path in variant_spec_paths() for spec in load_specs(path).specs
            if spec.family == "triton" and runs_here(spec) and spec.head_dim_qk == 64
            and spec.causal == (path.stem in ("alibi", "differential", "softcap"))]
LENGTHS = (200, 333)


@pytest.fixture(autouse=True)
def _compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.mark.parametrize("spec", CALLS, ids=[f"{s.variant}.{s.arch}" for s in CALLS])
@pytest.mark.time_limit(300)
def test_verify(spec: Spec, cuda: str) -> None:
    failures = [row for row in verify_spec([spec], path=spec.name) if not row.ok]
    assert not failures, "\n\n".join(row.message for row in failures[:3])


@pytest.mark.parametrize("spec", VARIANTS, ids=[f"{s.variant}.{s.arch}" for s in VARIANTS])
def test_shipped_variants(spec: Spec, device: str) -> None:
    """Small calls and one with many tiles; NaN in values that some rows see."""
    mask = {"causal": spec.causal, "dtype": spec.dtype, "head_dim_qk": spec.head_dim_qk, "head_dim_v": spec.head_dim_v}
    problems = ((Problem(5, (70, 0, 5, 140, 1), (200, 9, 0, 140, 300), 4, 2, tail=4, **mask),)
                if spec.kv_layout == "varlen" else
                (Problem(2, *LENGTHS, 4, 2, **mask), Problem(1, 1500, 1700, 6, 2, seed=4, **mask)))
    for problem in problems:
        inputs = problem.make_inputs(device).with_mods(spec, None, problem.seed)
        verified(inputs, problem, spec=spec, lse=spec.lse)
        verified(with_nans_in_v(inputs), f"{problem} with NaN in v", spec=spec, lse=spec.lse)


@pytest.mark.parametrize("spec", [s for s in VARIANTS if s.normalize == "softmax" and s.kv_layout == "dense"],
                         ids=lambda spec: spec.variant)
def test_gradients_of_variants(spec: Spec, device: str) -> None:
    """Beside fa2's kernels for the same expressions, whose outputs differ in the last bits alone."""
    problem = Problem(2, *LENGTHS, 4, 2, spec.head_dim_qk, spec.head_dim_v, causal=spec.causal, dtype=spec.dtype)
    inputs = problem.make_inputs(device).with_mods(spec, None, 1)
    params = inputs.keywords.get("params")
    out, lse = flashgen.attention(inputs.q, inputs.k, inputs.v, causal=spec.causal, return_lse=True, spec=spec,
                                  params=params)
    given = torch.randn_like(out), inputs.q, inputs.k, inputs.v, out, lse
    own = spec.with_(pass_="bwd", kernel="preprocess")
    other = own.with_(family="fa2", arch="sm_90")
    found, right = (flashgen.attention_backward(*given, causal=spec.causal, spec=one, params=params)
                    for one in (own, other))
    for name, a, b in zip(("dq", "dk", "dv"), found, right, strict=True):
        assert (a.float() - b.float()).norm() < 1e-2 * b.float().norm() + 1e-3, name


def test_head_dims_that_no_file_lists(device: str) -> None:
    for dims in ((8, 24), (72, 40), (96, 96), (192, 128)):
        spec = Spec(name="t", family="triton", pass_="fwd", arch=CALLS[0].arch, dtype="bf16", head_dim_qk=dims[0],
                    head_dim_v=dims[1], causal=True)
        problem = Problem(2, *LENGTHS, 6, 2, *dims, causal=True)
        verified(problem.make_inputs(device), problem, spec=spec)


def test_tiles_that_are_tried_at_the_first_call(cuda: str) -> None:
    """As on a device without a row in the table."""
    from unittest import mock

    from flashgen.codegen.families.triton.tiles import TILES

    problem = Problem(2, *LENGTHS, 4, 2, 64, 64, causal=True)
    spec = Spec(name="tried", family="triton", pass_="fwd", arch=CALLS[0].arch, dtype="bf16", head_dim_qk=64,
                causal=True)
    with mock.patch.object(type(TILES), "find", lambda *_: None):
        assert lower(spec).tried
        verified(problem.make_inputs(cuda), problem, spec=spec)


def test_the_same_bits_each_time_and_in_a_graph(cuda: str) -> None:
    problem = Problem(2, *LENGTHS, 4, 2, 64, 64, causal=True)
    inputs = problem.make_inputs(cuda)

    def call() -> tuple[Any, ...]:
        out, lse = flashgen.attention(inputs.q, inputs.k, inputs.v, causal=True, return_lse=True, spec="triton_fwd")
        return out, lse, *flashgen.attention_backward(torch.ones_like(out), inputs.q, inputs.k, inputs.v, out, lse,
                                                      causal=True, spec="triton_bwd", deterministic=True)
    first, again = call(), call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    graph.replay()
    for name, a, b, c in zip(("out", "lse", "dq", "dk", "dv"), first, again, captured, strict=True):
        check_bits(a, b, f"{name}, another run")
        check_bits(a, c, f"{name}, in a graph")


def test_lengths_do_not_make_it_compile_again(cuda: str) -> None:
    """Nor do batches and heads; a stride that 16 does not divide does, once."""
    [spec] = [s for s in CALLS if s.variant == "triton_fwd_bf16_d64_causal"]
    function: Any = _function(lower(spec), render(lower(spec)).text)

    def compiled() -> int:
        return sum(len(caches[0]) for caches in function.device_caches.values())
    for batch, seqlen_q, heads in ((2, 100, 4), (1, 128, 16), (3, 1, 2), (1, 777, 1)):
        problem = Problem(batch, seqlen_q, 2 * seqlen_q, heads, 1, 64, 64, causal=True)
        verified(problem.make_inputs(cuda), problem, spec=spec)
    assert compiled() <= 2  # with and without a batch stride that 16 divides


def test_a_bundle_serves_it(cuda: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flashgen.runtime.select.bundle import write_bundle

    [spec] = [s for s in CALLS if s.variant == "triton_fwd_fp16_d128_causal"]
    plan = lower(spec)
    entry = Cache(tmp_path / "cache").build(plan, render(plan))
    monkeypatch.setattr(registry, "_bundles", None)
    flashgen.load_bundle(write_bundle([entry], tmp_path / "bundle"))
    try:
        problem = Problem(1, *LENGTHS, 4, 2, 128, 128, causal=True, dtype="fp16")
        verified(problem.make_inputs(cuda), problem)
    finally:
        monkeypatch.setattr(registry, "_bundles", None)
        flashgen.reload()
