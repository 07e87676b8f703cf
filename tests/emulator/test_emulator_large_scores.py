"""B114: scores far from zero, where a reference is a rounded number and a product is not. On the emulator.

Every score here is exact in fp32: one product, or a sum of two that needs no rounding. So what is left is what the
softmax does with it, and equal scores must weigh the same wherever their keys lie.
"""
from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from emulator_kit import shipped
from large_scores import PATTERNS, SOFT, inputs_of, judge, mla_inputs_of
from mla_kit import MLA_SPECS
from sampling import one_in

from flashgen.codegen.spec.spec import Spec
from flashgen.runtime.emulator.kernel import emulated_sms
from flashgen.runtime.ops.attention.op import run_poisoned
from flashgen.runtime.ops.mla_decode.problem import run_poisoned as run_mla

SMALL = {"tile": {"m": 128, "n": 32}, "stages": 2}
# Kernels in which scores take every way there is: see the skeletons, and softmax_lazy.cuh.
WAYS: dict[str, dict[str, object]] = {
    "full": {}, "causal": {"causal": True}, "split": {"split": True}, "packed": {"split": True, "pack_gqa": True},
    "varlen": {"kv_layout": "varlen"}, "window": {"window": True}, "fp16": {"dtype": "fp16"},
    "P in shared memory": {"p_operand": "shared"}, "fa2": {"family": "fa2"},
}


def kernel_of(way: str) -> Spec:
    changes = WAYS[way]
    if changes.get("family") == "fa2":
        return shipped("fa2_fwd_bf16_d64")
    return shipped("fa3_fwd_bf16_d64", "sm_90a").with_(**{**SMALL, **changes})


def attend(spec: Spec, scores: Sequence[float], level: float = 0.0) -> None:
    inputs = inputs_of(spec, scores)
    with emulated_sms(5):
        out, lse = run_poisoned(inputs, spec=spec, lse=spec.lse)
    judge(out, lse, inputs, scores, level)


@pytest.mark.parametrize("way", WAYS)
def test_far_scores(way: str) -> None:
    spec = kernel_of(way)
    for pattern in one_in(2, PATTERNS):
        attend(spec, PATTERNS[pattern](160, spec.dtype))


@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("pattern", ["one huge score", "far below, then ordinary", "small, then huge"])
def test_far_scores_of_shipped_tiles(head_dim: int, pattern: str) -> None:
    spec = shipped(f"fa3_fwd_bf16_d{head_dim}", "sm_90a")
    attend(spec, PATTERNS[pattern](400, spec.dtype))


@pytest.mark.parametrize("level", SOFT)
def test_weights_are_as_exact_as_the_scores(level: float) -> None:
    """Scores that differ by ordinary amounts, around a level that leaves them so many digits."""
    for way in ("full", "fp16"):
        spec = kernel_of(way)
        attend(spec, [level + (j * 7 % 16) / 4 for j in range(160)], level)


def test_rows_beside_far_ones_keep_their_bits() -> None:
    spec = kernel_of("full")
    inputs = inputs_of(spec, PATTERNS["small, then huge"](160, spec.dtype), rows_between=2)
    alone = inputs.with_(q=torch.where(inputs.q[..., :1] != 0, torch.zeros_like(inputs.q), inputs.q))
    beside, lse = run_poisoned(inputs, spec=spec, lse=True)
    plain, _ = run_poisoned(alone, spec=spec, lse=True)
    assert torch.equal(beside[:, 1::2], plain[:, 1::2]) and not torch.equal(beside[:, ::2], plain[:, ::2])
    assert math.isfinite(float(lse.max()))


@pytest.mark.parametrize("pattern", one_in(2, PATTERNS))
@pytest.mark.parametrize("spec", [s for s in MLA_SPECS if s.pass_ == "decode"][:2], ids=lambda s: s.variant)
def test_far_scores_of_mla(spec: Spec, pattern: str) -> None:
    scores = PATTERNS[pattern](200, spec.dtype)
    inputs = mla_inputs_of(spec, scores)
    for sms in (1, 4):
        with emulated_sms(sms):
            out, lse = run_mla(inputs, spec=spec)
        judge(out, lse, inputs, scores)
