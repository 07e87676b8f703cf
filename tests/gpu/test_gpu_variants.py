"""Shipped variants on Hopper against the fp64 reference: small calls, mid-sized ones, long ones, all parameters drawn.

With --on-cpu the tests are tested, not the kernels.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from emulator_kit import with_nans_in_v
from kit import attend, verified

import flashgen
from flashgen.codegen.spec.spec import Spec, load_specs, variant_spec_paths
from flashgen.runtime.ops.attention.problem import Inputs, Problem

pytestmark = pytest.mark.gpu

# Each file as fa3 with both head dims and layouts, scores in fp16 once; as fa2, built for this card, dense.
FA3 = [spec for path in variant_spec_paths() for spec in load_specs(path).specs
       if spec.family == "fa3" and (spec.head_dim_qk, spec.kv_layout, spec.dtype) in (
           (128, "dense", "bf16"), (64, "varlen", "bf16"), *([(64, "dense", "fp16")] if spec.score != "none" else []))
       and (spec.causal or spec.name not in ("softcap", "differential"))]
FA2 = [spec.with_(arch="sm_90") for path in variant_spec_paths() for spec in load_specs(path).specs
       if spec.family == "fa2" and (spec.head_dim_qk, spec.kv_layout, spec.dtype) == (64, "dense", "bf16")
       and not spec.causal]
SPECS = FA3 + FA2
over_specs = pytest.mark.parametrize("spec", SPECS, ids=[f"{spec.variant}.{spec.arch}" for spec in SPECS])


@pytest.fixture(scope="module", autouse=True)
def _built() -> Iterator[None]:
    """All kernels at once, on all cores: one after the other would take minutes."""
    if torch.cuda.is_available():
        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("fa3 kernels are for compute capability 9.0")
        from flashgen.runtime.compile.build import build_specs

        failed = [f"{result.variant}: {result.error['what']}" for result in build_specs(SPECS) if result.error]
        assert not failed, failed
    yield


def small_problems(spec: Spec) -> list[Problem]:
    """First, last, only, whole, masked and missing tiles; queries without keys, and keys without queries."""
    mask = {"causal": spec.causal, "dtype": spec.dtype, "head_dim_qk": spec.head_dim_qk, "head_dim_v": spec.head_dim_v}
    if spec.kv_layout == "varlen":
        return [Problem(5, (70, 0, 5, 140, 1), (200, 9, 0, 140, 300), 4, 2, tail=4, **mask),
                Problem(2, (129, 63), (129, 63), 6, 2, seed=1, **mask)]
    return [Problem(2, 150, 170, 4, 2, **mask), Problem(1, 1, 300, 3, 1, seed=1, **mask),
            Problem(2, 130, 64, 2, 2, seed=2, **mask), Problem(1, 385, 385, 2, 1, seed=3, softmax_scale=1.0, **mask)]


def mid_problems(spec: Spec) -> list[Problem]:
    """More query tiles than SMs, of different lengths; long rows."""
    mask = {"causal": spec.causal, "dtype": spec.dtype, "head_dim_qk": spec.head_dim_qk, "head_dim_v": spec.head_dim_v}
    if spec.kv_layout == "varlen":
        lengths = (1, 900, 17, 0, 2000, 130, 513)
        return [Problem(7, lengths, lengths, 12, 4, seed=4, tail=3, **mask)]
    return [Problem(3, 1500, 1700, 12, 4, seed=4, **mask), Problem(1, 4096, 4096, 2, 1, seed=5, **mask)]


def inputs_of(spec: Spec, problem: Problem, device: str, params: dict[str, Any] | None = None) -> Inputs:
    return problem.make_inputs(device).with_mods(spec, params, problem.seed)


@over_specs
def test_small_calls(spec: Spec, device: str) -> None:
    for problem in small_problems(spec):
        inputs = inputs_of(spec, problem, device)
        verified(inputs, problem, spec=spec, lse=spec.lse)
        verified(with_nans_in_v(inputs), f"{problem} with NaN in v", spec=spec, lse=spec.lse)


@over_specs
def test_mid_sized_calls(spec: Spec, device: str) -> None:
    """Also twice the same call: the same bits."""
    for problem in mid_problems(spec):
        if device == "cpu":
            problem = replace(problem, num_heads_q=1, num_heads_kv=1)
        inputs = inputs_of(spec, problem, device)
        first = verified(inputs, problem, spec=spec, lse=spec.lse)
        again = attend(inputs, return_lse=spec.lse, spec=spec)
        for one, other in zip(first, again if spec.lse else (again,), strict=False):
            assert torch.equal(one, other), f"another call, other bits: {problem}"


def one(name: str, **fields: Any) -> Spec:
    return next(spec for spec in FA3 if spec.name == name and all(getattr(spec, key) == value
                                                                  for key, value in fields.items()))


VALUES: list[tuple[str, dict[str, Any]]] = [
    *(("sliding_window", {"window": window}) for window in (1, 0, -5, 128, 4096, 2**31 - 1)),
    *(("chunked", {"chunk": chunk}) for chunk in (1, 64, 1000, 8192, 0)),
    *(("window_sinks", {"window": 128, "num_sink": number}) for number in (0, 4, 700)),
    *(("softcap", {"softcap": cap}) for cap in (0.5, 50.0)), ("sigmoid", {"bias": -7.0})]


@pytest.mark.parametrize(("name", "params"), VALUES, ids=str)
def test_values_of_scalars(name: str, params: dict[str, Any], device: str) -> None:
    spec = one(name, head_dim_qk=128)
    problem = Problem(2, 700, 1100, 4, 2, 128, 128, causal=spec.causal)
    verified(inputs_of(spec, problem, device, params), f"{problem}, {params}", spec=spec, lse=spec.lse)


def test_tensors_people_have(device: str) -> None:
    """Documents as packing makes them, a tree, block lists of one, prefixes of nothing and of all."""
    problem = Problem(2, 1300, 1300, 4, 2, 128, 128)
    documents = torch.repeat_interleave(torch.arange(6), torch.tensor([1, 499, 130, 64, 6, 600])).int()
    tree = torch.eye(64, dtype=torch.bool, device=device) | (torch.arange(64, device=device) < 3)
    blocks = torch.zeros(512, 512, dtype=torch.bool, device=device)
    blocks[:, ::3] = True
    for name, params in (("document", {"doc": torch.stack([documents, documents.flip(0).neg().add(9)]).to(device)}),
                         ("tree_mask", {"tree": tree}), ("block_sparse", {"blocks": blocks}),
                         ("prefix_lm", {"prefix": torch.tensor([0, 1300], dtype=torch.int32, device=device)}),
                         ("window_sinks", {"sink": torch.tensor([-torch.inf, 40.0, 0.0, -200.0], device=device)})):
        spec = one(name, head_dim_qk=128)
        verified(inputs_of(spec, problem, device, params), f"{name}, {problem}", spec=spec, lse=spec.lse)


@pytest.mark.parametrize("name", ["document", "alibi", "sliding_window", "window_sinks"])
def test_a_graph_replays_with_new_tensors(name: str, cuda: str) -> None:
    """What tensors hold is read at each replay; the last block leaves the counters as it found them."""
    spec = one(name, head_dim_qk=128)
    problem = Problem(4, 900, 900, 12, 4, 128, 128, causal=spec.causal)
    inputs = inputs_of(spec, problem, cuda)
    assert inputs.mods is not None
    attend(inputs, spec=spec)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = attend(inputs, spec=spec)
    for seed in (1, 2, 3):
        other = inputs_of(spec, replace(problem, seed=seed), cuda)
        assert other.mods is not None
        scalars = {key: value for key, value in inputs.mods.params.items() if not isinstance(value, torch.Tensor)}
        for mine, new in ((inputs.q, other.q), (inputs.k, other.k), (inputs.v, other.v), *(
                (value, other.mods.params[key]) for key, value in inputs.mods.params.items()
                if key not in scalars)):
            mine.copy_(new)
        out.fill_(float("nan"))
        graph.replay()
        expected = flashgen.attention(other.q, other.k, other.v, causal=spec.causal, spec=spec,
                                      params={**other.mods.params, **scalars})
        assert torch.equal(out, expected)


def test_without_a_file(device: str) -> None:
    """flashgen.variant on the card: families by arch, dense and packed."""
    if device == "cpu":
        pytest.skip("the reference takes specs only")
    variant = flashgen.variant("cap * tanh(score / cap)", "kv_pos <= q_pos and kv_pos % stride < 40",
                               params={"cap": {"type": "float", "default": 8.0}, "stride": {"type": "int"}})
    for problem in (Problem(2, 600, 700, 4, 2, 128, 128), Problem(3, (1, 400, 77), (9, 500, 0), 4, 2, 64, 64)):
        spec = variant.spec(pass_="fwd", family="fa3", arch="sm_90a", dtype="bf16", head_dim_qk=problem.head_dim_qk,
                            head_dim_v=problem.head_dim_v, kv_layout="varlen" if problem.varlen else "dense")
        inputs = inputs_of(spec, problem, device, {"stride": 100})
        expected = verified(inputs, problem, spec=spec)
        found = flashgen.attention(inputs.q, inputs.k, inputs.v, **inputs.keywords, return_lse=True, spec=variant)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
