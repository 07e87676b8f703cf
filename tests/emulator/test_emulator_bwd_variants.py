"""Gradients of specs with expressions on the emulator: right, and without a fault of any kind, in all schedules."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from emulated_backward import Call, backward_spec, in_all_orders

from flashgen.codegen.spec.spec import load_specs, spec_path
from flashgen.runtime.verify.expression_mods import sample_params

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


@pytest.mark.parametrize("name", ["softcap", "alibi", "t5_bias", "chunked", "sliding_window", "window_sinks", "document",
                                  "prefix_lm", "block_sparse", "tree_mask"])
def test_shipped_variants(name: str) -> None:
    values: dict[str, Any] = {"prefix_lm": {"prefix": torch.tensor([70], dtype=torch.int32)},
                              "softcap": {"softcap": 1.5}, "chunked": {"chunk": 64},
                              "window_sinks": {"window": 40, "num_sink": 4}}.get(name, {})
    check(variant_fields(name), Call(LENGTHS, dlse=True), **values)
