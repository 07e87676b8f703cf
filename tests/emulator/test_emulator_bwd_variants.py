"""Gradients of specs with expressions on the emulator: right, and without a fault of any kind, in all schedules."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from emulated_backward import Call, backward_spec, in_all_orders

import flashgen
from flashgen.codegen.families.registry import lower
from flashgen.codegen.render import render
from flashgen.codegen.spec.spec import load_specs, spec_path
from flashgen.errors import SpecError
from flashgen.runtime.select.variant import Variant
from flashgen.runtime.verify.expression_mods import ExpressionMods, sample_params
from flashgen.runtime.verify.reference import reference

LENGTHS = ((130, 200),)


def variant_fields(name: str) -> dict[str, Any]:
    """What makes a shipped spec another attention."""
    spec = load_specs(spec_path(name)).specs[0]
    return {"score": spec.score, "mask": spec.mask, "params": spec.params, "sink": spec.sink}


def check(fields: dict[str, Any], *calls: Call, head_dim: int = 64, arch: str = "sm_80", seeds: int = 1,
          **values: Any) -> None:
    spec = backward_spec("fa2", arch, (head_dim, head_dim), **fields)
    rows = [sum(pair[side] for pair in calls[0].lengths) for side in (0, 1)]
    sizes = {"num_heads_q": calls[0].num_heads_q, "num_heads_kv": calls[0].num_heads_kv, "batch": len(calls[0].lengths),
             **dict(zip(("seqlen_q", "seqlen_kv"), calls[0].lengths[0], strict=True)),
             **dict(zip(("total_q", "total_kv"), rows, strict=True))}
    params = {**sample_params(spec, sizes), **values}
    in_all_orders(spec, [Call(**{**vars(call), "params": params}) for call in calls], seeds)


@pytest.mark.parametrize("name", ["softcap", "alibi", "t5_bias", "chunked", "sliding_window", "window_sinks",
                                  "document", "prefix_lm", "block_sparse", "tree_mask"])
def test_shipped_variants(name: str) -> None:
    values: dict[str, Any] = {"prefix_lm": {"prefix": torch.tensor([70], dtype=torch.int32)},
                              "softcap": {"softcap": 1.5}, "chunked": {"chunk": 64},
                              "window_sinks": {"window": 40, "num_sink": 4}}.get(name, {})
    check(variant_fields(name), Call(LENGTHS, dlse=True), **values)


HEAD_WINDOWS = {"mask": "kv_pos <= q_pos and q_pos - kv_pos < reach[head_q]",
                "params": {"reach": {"type": "tensor", "dtype": "int32", "shape": ["num_heads_q"]}}}
# Positions past the last query would make NaN, if anything came of them.
ROOTS = {"score": "score * log(float(seqlen_q - q_index)) if q_index < seqlen_q else log(-1.0)", "params": {}}


def test_masks_of_heads() -> None:
    """Each query head of a kv head has tiles of its own, and one has none."""
    check(HEAD_WINDOWS, Call(((300, 300),), 4, 2), reach=torch.tensor([200, 10, 0, 77], dtype=torch.int32))
    check({**HEAD_WINDOWS, "align": "top_left"}, Call(((300, 140), (300, 140)), 2, 1, dlse=True),
          reach=torch.tensor([0, 90], dtype=torch.int32))


@pytest.mark.parametrize("fields", [
    {"score": "score + bias[head_q, kv_pos]", "mask": "doc[q_pos] == doc[kv_pos] and batch != 1", "params": {
        "bias": {"type": "tensor", "dtype": "float32", "shape": ["num_heads_q", 8]},
        "doc": {"type": "tensor", "dtype": "int32", "shape": ["total_kv"], "sorted": True}}},
    {**ROOTS, "causal": True}, {**ROOTS, "window": True, "dtype": "fp16"}], ids=["both", "causal", "window"])
def test_packed_sequences(fields: dict[str, Any]) -> None:
    """Some without queries or keys; rows of no sequence behind the last."""
    check({**fields, "kv_layout": "varlen"},
          Call(((70, 100), (30, 30), (0, 50), (130, 0), (140, 200)), 2, 1, rest=(5, 0), window=(40, 20)))


def test_more_tiles_than_a_warp_looks_at_once() -> None:
    """Of which most are empty: those in between are passed over by the spans of tiles."""
    mask = {"mask": "kv_pos <= q_pos and q_pos - kv_pos < 5 or kv_pos == 0 and q_pos % 4000 < 2"}
    check(mask, Call(((8300, 70),), 1, 1), arch="sm_86")


def test_gradients_of_tensors() -> None:
    """Elements that one, some and all scores read; a factor that hangs on the score; one tensor that two terms read."""
    fields = {"score": "a[head_q] * tanh(score * b[kv_pos % 7, batch]) + b[0, 0] * a[0] + a[q_pos % 2]", "params": {
        "a": {"type": "tensor", "dtype": "float32", "shape": ["num_heads_q"]},
        "b": {"type": "tensor", "dtype": "float32", "shape": [7, "batch"]}}}
    check({**fields, "causal": True}, Call(((130, 200), (130, 200)), dlse=True))
    check({**fields, "mask": "q_pos - kv_pos < 70", "kv_layout": "varlen"},
          Call(((70, 100), (0, 50), (130, 0), (140, 200)), 2, 2, rest=(5, 9)))


@pytest.mark.parametrize("arch, head_dim", [("sm_86", 128), ("sm_80", 256), ("sm_90", 96)])
def test_other_tiles(arch: str, head_dim: int) -> None:
    """With one stage, and with dQ in two parts."""
    check(variant_fields("document") | {"score": "1.5 * tanh(score / 1.5)"}, Call(((150, 190),)), arch=arch,
          head_dim=head_dim)


@pytest.mark.parametrize("spec, params", [
    (flashgen.variant("cap * tanh(score / cap)", "kv_pos <= q_pos", params={"cap": {"type": "float"}}), {"cap": 1.5}),
    ("window_sinks", {"window": 20, "sink": torch.tensor([0.5, -1.0], requires_grad=True)}),
    (flashgen.variant("score * a[0] + b[kv_pos % 5]", params={
        name: {"type": "tensor", "dtype": "float32", "shape": [5]} for name in "ab"}),
     {"a": torch.ones(5), "b": torch.zeros(5, requires_grad=True)}),
], ids=["variant", "file", "tensors"])
def test_autograd_finds_the_gradients_of_a_spec(spec: Any, params: dict[str, Any]) -> None:
    """Of forward kernels' specs it finds backward ones."""
    draw = torch.Generator().manual_seed(1)
    inputs = [torch.randn(1, rows, heads, 64, generator=draw).bfloat16().requires_grad_()
              for rows, heads in ((70, 2), (140, 1), (140, 1))]
    out = flashgen.attention(*inputs, spec=spec, params=params)
    dout = torch.randn(out.shape, generator=draw).bfloat16()
    fields = spec.fields if isinstance(spec, Variant) else variant_fields(spec)
    mods = ExpressionMods.of(backward_spec("fa2", "sm_90", (64, 64), **fields), params)
    leaves = [*inputs, *(t for t in params.values() if isinstance(t, torch.Tensor) and t.requires_grad)]
    right, _ = reference(*inputs, mods=mods)
    wanted = torch.autograd.grad(right, leaves, dout.double())
    for found, exact in zip(torch.autograd.grad(out, leaves, dout), wanted, strict=True):
        assert (found.double() - exact).norm() < 4e-3 * exact.norm() + 1e-3


def test_generated_lines_are_short() -> None:
    """Less the text of expressions, which breaks where it has spaces."""
    for name in ("softcap", "t5_bias", "document"):
        for layout in ("dense", "varlen") if name != "document" else ("dense",):
            plan = lower(backward_spec("fa2", "sm_80", (64, 64), kv_layout=layout, **variant_fields(name)))
            assert max(map(len, render(plan).text.split("\n"))) <= 110


def test_scores_in_turns() -> None:
    """Deterministic sums of dQ; masks by expression have no turns."""
    check({**variant_fields("softcap"), "deterministic": True, "causal": True}, Call(((130, 200),), 2, 2), softcap=1.5)
    with pytest.raises(SpecError, match="mask by expression"):
        check({**variant_fields("document"), "deterministic": True}, Call(LENGTHS))
