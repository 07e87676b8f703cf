"""B114 on the card: scores far from zero through every kind of shipped fa3 and flashmla kernel, and fa2's."""
from __future__ import annotations

import pytest
import torch
from emulator_kit import shipped
from large_scores import PATTERNS, SOFT, inputs_of, judge, mla_inputs_of
from mla_kit import MLA_SPECS

from flashgen.codegen.spec.spec import Spec, load_specs, shipped_spec_paths
from flashgen.runtime.ops.attention.op import run_poisoned
from flashgen.runtime.ops.mla_decode.problem import run_poisoned as run_mla

pytestmark = pytest.mark.gpu
ORDINARY = [spec for path in shipped_spec_paths() for spec in load_specs(path).specs
            if (spec.family, spec.pass_) == ("fa3", "fwd") and not spec.expressions and spec.sink == "none"
            and spec.normalize == "softmax"]


@pytest.fixture(autouse=True)
def _on_hopper(device: str) -> None:
    if device == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("fa3 and flashmla kernels are for compute capability 9.0")


@pytest.mark.parametrize("spec", [*ORDINARY, shipped("fa2_fwd_bf16_d128_causal")], ids=lambda spec: spec.variant)
def test_far_scores(spec: Spec, device: str) -> None:
    for pattern in PATTERNS.values():
        scores = pattern(700, spec.dtype)
        inputs = inputs_of(spec, scores, device=device)
        judge(*run_poisoned(inputs, spec=spec, lse=spec.lse), inputs, scores)


@pytest.mark.parametrize("level", SOFT)
def test_weights_are_as_exact_as_the_scores(level: float, device: str) -> None:
    for variant in ("bf16_d64", "fp16_d128", "bf16_d256"):
        spec = shipped(f"fa3_fwd_{variant}", "sm_90a")
        scores = [level + (j * 7 % 16) / 4 for j in range(700)]
        inputs = inputs_of(spec, scores, device=device)
        judge(*run_poisoned(inputs, spec=spec), inputs, scores, level)


@pytest.mark.parametrize("spec", [s for s in MLA_SPECS if s.pass_ == "decode" and s.head_dim_qk == 576],
                         ids=lambda spec: spec.variant)
def test_far_scores_of_mla(spec: Spec, device: str) -> None:
    for pattern in PATTERNS.values():
        scores = pattern(3000, spec.dtype)
        inputs = mla_inputs_of(spec, scores, device)
        judge(*run_mla(inputs, spec=spec), inputs, scores)
