"""Kernels of Triton in its interpreter, against fp64. tests/emulator/test_emulator_triton.py runs these in a process
that has TRITON_INTERPRET, since Triton reads it when it is imported. fp16, since the interpreter's bf16 is our fp32.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import emulated_backward
import pytest
import torch
from emulated_backward import Call, check_backward
from emulator_kit import with_nans_in_v
from torch import Tensor

import flashgen
from flashgen.codegen.families.registry import lower, pass_of, program_of
from flashgen.codegen.families.shared.launch import UNBOUNDED, Sizes
from flashgen.codegen.render import render
from flashgen.codegen.spec.spec import Spec, load_specs, spec_path, variant_spec_paths
from flashgen.runtime.emulator.program import EmulatedProgram
from flashgen.runtime.emulator.schedule import Schedule
from flashgen.runtime.launch.triton import InterpretedKernel
from flashgen.runtime.ops.attention.op import IDENTITIES
from flashgen.runtime.ops.attention.problem import Inputs, Problem
from flashgen.runtime.verify.compare import check, check_bits, named
from flashgen.runtime.verify.expression_mods import ExpressionMods, sample_params
from flashgen.runtime.verify.subject import Subject

SMALL: dict[str, Any] = {"name": "t", "family": "triton", "arch": "sm_90", "dtype": "fp16", "tile": {"m": 32, "n": 32}}
WINDOWS = ((3, 0), (17, 64), (-1, 3), (5, -1))
# Of shipped variants: values under which short sequences have tiles of all classes.
VALUES: dict[str, dict[str, Any]] = {
    "prefix_lm": {"prefix": torch.tensor([40, 3, 2], dtype=torch.int32)}, "softcap": {"softcap": 1.5},
    "chunked": {"chunk": 64}, "window_sinks": {"window": 40, "num_sink": 4}, "sliding_window": {"window": 40}}
VARIANTS = [path.stem for path in variant_spec_paths()]
PACKED = ((70, 0, 33), (150, 20, 5))
TENSORS = {"score": "a[head_q] * tanh(score * b[kv_pos % 7, batch]) + b[0, 0] * a[0] + a[q_pos % 2]", "params": {
    "a": {"type": "tensor", "dtype": "float32", "shape": ["num_heads_q"]},
    "b": {"type": "tensor", "dtype": "float32", "shape": [7, "batch"]}}}


def forward(problem: Problem, inputs: Inputs | None = None, given_params: Mapping[str, Any] | None = None, **fields: Any
            ) -> Tensor:
    """`out`, judged against fp64 like lse."""
    spec = Spec(**{**SMALL, "pass_": "fwd", "head_dim_qk": problem.head_dim_qk, "head_dim_v": problem.head_dim_v,
                   "dtype": problem.dtype, "kv_layout": "varlen" if problem.varlen else "dense", **fields})
    given = problem.make_inputs() if inputs is None else inputs
    if spec.expressions or spec.sink != "none" or spec.normalize != "softmax":
        given = given.with_mods(spec, given_params, problem.seed)
    result = flashgen.attention(given.q, given.k, given.v, **{"spec": spec, **given.keywords}, return_lse=spec.lse)
    out, lse = result if spec.lse else (result, None)
    check(named(out, lse), given, label=f"{spec.variant}, {problem}")
    return out


def problem_of(*sizes: Any, **more: Any) -> Problem:
    return Problem(*sizes, **{"dtype": "fp16", **more})


def launch_backward(spec: Spec, call: Call, tensors: dict[str, Tensor], schedule: Schedule) -> Tensor:
    """In place of emulated_backward._launch, whose kernels have sums of their own."""
    varlen = spec.kv_layout == "varlen"
    plans = [lower(spec.with_(**dict(kernel))) for kernel in pass_of(spec).kernels]
    strides = {f"{name}_{axis}_stride": stride for name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
               for axis, stride in zip(("row", "head") if varlen else ("batch", "row", "head"), tensors[name].stride(),
                                       strict=False)}
    lengths = tuple(len(tensors[name]) for name in "qk") if varlen else call.lengths[0]
    sizes = Sizes(len(call.lengths), *lengths, call.num_heads_q, call.num_heads_kv, spec.head_dim_qk**-0.5,
                  call.top_left, call.window, strides)
    values = {f"user_{name}": value for name, value in ExpressionMods.of(spec, call.params).values.items()}
    scalars = {name: value for name, value in values.items() if not isinstance(value, Tensor)}
    program = program_of(plans[0], sizes, 1, *plans[1:]).with_values(scalars)
    kernels: Any = {plan.step: InterpretedKernel(plan, render(plan)) for plan in plans}
    EmulatedProgram(program, kernels)({**tensors, **{n: t for n, t in values.items() if isinstance(t, Tensor)}})
    return torch.empty(0)


def backward(call: Call, head_dims: tuple[int, int] = (64, 64), **fields: Any) -> None:
    spec = Spec(**{**SMALL, "pass_": "bwd", "kernel": "key_gradients", "head_dim_qk": head_dims[0],
                   "head_dim_v": head_dims[1], **fields})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulated_backward, "_launch", launch_backward)
        check_backward(spec, call, Schedule())


def fields_of(name: str) -> dict[str, Any]:
    spec = load_specs(spec_path(name)).specs[0]
    return {"score": spec.score, "mask": spec.mask, "params": spec.params, "sink": spec.sink,
            "normalize": spec.normalize, "lse": spec.lse}


# ---- forward

@pytest.mark.parametrize("lengths", [(1, 1), (32, 32), (33, 31), (70, 90), (90, 70), (5, 0)], ids=str)
@pytest.mark.parametrize("causal", [False, True, "top_left"])
def test_forward_masks_and_lengths(causal: bool | str, lengths: tuple[int, int]) -> None:
    forward(problem_of(2, *lengths, 4, 2, 64, 64, causal=causal), causal=bool(causal))


@pytest.mark.parametrize("window", [(0, 0), *WINDOWS], ids=str)
def test_forward_windows(window: tuple[int, int]) -> None:
    forward(problem_of(1, 90, 130, 2, 1, 64, 64, window=window), window=True)


@pytest.mark.parametrize("head_dims", [(8, 8), (40, 24), (96, 96), (192, 128)], ids=str)
def test_forward_head_dims(head_dims: tuple[int, int]) -> None:
    forward(problem_of(1, 40, 50, 2, 2, *head_dims, causal=True), causal=True)


def test_forward_packed_sequences() -> None:
    for fields in ({}, {"causal": True}, {"window": True}):
        window = (17, 3) if "window" in fields else UNBOUNDED
        forward(problem_of(3, *PACKED, 4, 2, 64, 64, causal="causal" in fields, window=window, tail=3), **fields)


def test_forward_other_tiles() -> None:
    """Those of the table, those that a device without a row tries, and bf16."""
    problem = problem_of(1, 140, 150, 2, 1, 64, 64, causal=True)
    for fields in ({"tile": None}, {"tile": None, "arch": "gfx942"}, {"lse": False}, {"tile": {"m": 16, "n": 128}}):
        forward(problem, causal=True, **fields)
    forward(problem_of(1, 40, 50, 2, 1, 64, 64, dtype="bf16"))


def test_forward_nan_and_infinity() -> None:
    """In values that a row sees they reach it; in others they reach nothing."""
    problem = problem_of(1, 70, 90, 2, 1, 64, 64, causal=True)
    forward(problem, with_nans_in_v(problem.make_inputs()), causal=True)
    inputs = problem.make_inputs()
    k, v = inputs.k.clone(), inputs.v.clone()
    k[:, -1], v[:, -1], v[:, 3, :, ::2] = torch.nan, torch.inf, -torch.inf
    hidden = forward(problem, inputs.with_(v=v.clone().index_fill_(1, torch.tensor([89]), 0.0)), causal=True)
    found = forward(problem, inputs.with_(v=v), causal=True)
    check_bits(found[:, :-1], hidden[:, :-1], "rows that do not see the last key")


@pytest.mark.parametrize("name", IDENTITIES)
def test_forward_identities(name: str) -> None:
    """A request's bits hang neither on its neighbours, nor on strides, nor on keys that it does not see."""
    spec = Spec(**SMALL, pass_="fwd", head_dim_qk=64, causal=True)
    IDENTITIES[name](Subject(spec, "cpu", emulated=True), problem_of(2, 70, 70, 2, 1, 64, 64, causal=True))


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_forward(name: str) -> None:
    fields, dims = fields_of(name), (64, 128 if name == "differential" else 64)
    batches: list[tuple[int, Any, Any]] = [(1, 70, 150)] if name in ("document", "block_sparse") else [
        (1, 70, 150), (3, *PACKED)]
    for batch, seqlen_q, seqlen_kv in batches:
        problem = problem_of(batch, seqlen_q, seqlen_kv, 2, 1, *dims)
        values = {key: value[:batch] if isinstance(value, Tensor) else value
                  for key, value in VALUES.get(name, {}).items()}
        forward(problem, with_nans_in_v(problem.make_inputs()), values, **fields)


# ---- backward

@pytest.mark.parametrize("causal", [False, True])
def test_backward_dense(causal: bool) -> None:
    backward(Call(((70, 90), (70, 90)), 4, 2, dlse=True), causal=causal)
    backward(Call(((90, 70),), top_left=causal), (40, 24), causal=causal)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_backward_windows(window: tuple[int, int]) -> None:
    backward(Call(((90, 130),), window=window), window=True)


@pytest.mark.parametrize("fields", [{"causal": True}, {"window": True}, {}], ids=str)
def test_backward_packed_sequences(fields: dict[str, Any]) -> None:
    backward(Call(((70, 100), (30, 30), (0, 50), (130, 0), (40, 60)), window=(40, 20) if "window" in fields
                  else UNBOUNDED, rest=(5, 3)), kv_layout="varlen", **fields)


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "sigmoid"])
def test_variants_backward(name: str) -> None:
    fields = fields_of(name)
    spec = Spec(**SMALL, pass_="fwd", head_dim_qk=64, **fields)
    sizes = {"num_heads_q": 2, "num_heads_kv": 1, "batch": 1, "seqlen_q": 70, "seqlen_kv": 130}
    values = {key: value[:1] if isinstance(value, Tensor) else value for key, value in VALUES.get(name, {}).items()}
    backward(Call(((70, 130),), dlse=True, params={**sample_params(spec, sizes), **values}), **fields)


def test_backward_gradients_of_tensors() -> None:
    """Elements that one, some and all scores read; a factor that hangs on the score; one tensor that two terms read."""
    draw = torch.Generator().manual_seed(1)
    params = {"a": torch.tensor([0.5, 0.7]), "b": torch.rand(7, 2, generator=draw)}
    backward(Call(((70, 90), (70, 90)), dlse=True, params=params), **TENSORS, causal=True)
    packed = {**params, "b": torch.rand(7, 4, generator=draw)}
    backward(Call(((70, 100), (0, 50), (130, 0), (40, 60)), 2, 2, rest=(5, 9), params=packed), **TENSORS,
             mask="q_pos - kv_pos < 70", kv_layout="varlen")


def test_backward_by_name_gives_the_same_bits_each_time() -> None:
    """flashgen.attention_backward of a shipped spec, also where deterministic results are asked for."""
    problem = problem_of(1, 70, 90, 2, 1, 64, 64, causal=True)
    inputs = problem.make_inputs()
    out, lse = flashgen.attention(inputs.q, inputs.k, inputs.v, causal=True, return_lse=True, spec="triton_fwd")
    given = torch.randn_like(out), inputs.q, inputs.k, inputs.v, out, lse
    first = flashgen.attention_backward(*given, causal=True, spec="triton_bwd")
    for found, same in zip(first, flashgen.attention_backward(*given, causal=True, spec="triton_bwd",
                                                              deterministic=True), strict=True):
        check_bits(found, same, "another run")
