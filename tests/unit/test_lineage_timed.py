"""The jobs of a lineage on the CPU, with the reference for the kernels: calls, errors against fp64, bytes held."""
from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from backward_kit import backward_by_reference
from kit import attention_by_reference
from lineage_kit import FakeDevice
from mla_kit import mla_by_reference

import flashgen
from flashgen.errors import VerifyError
from flashgen.runtime.measure.bench import Call, Run
from flashgen.runtime.measure.lineage import Generation, Lineage, measure
from flashgen.runtime.ops.attention import lineage_timed as attention
from flashgen.runtime.ops.attention.lineage import LINEAGE as ATTENTION
from flashgen.runtime.ops.mla_decode import lineage_timed as decode
from flashgen.runtime.ops.mla_decode.lineage import LINEAGE as DECODE
from flashgen.runtime.verify.reference import reference

DEVICE: Any = SimpleNamespace(l2_bytes=1, num_sms=132, place="cpu", data="normal")
GQA = {"batch": 3, "seqlen": 40, "heads": 4, "heads_kv": 2, "head_dim": 64, "causal": True}


@pytest.fixture(autouse=True)
def kernels_by_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashgen, "attention", attention_by_reference)
    monkeypatch.setattr(flashgen, "attention_backward", backward_by_reference)
    monkeypatch.setattr(flashgen, "mla_decode", mla_by_reference)
    monkeypatch.setattr(flashgen, "mla_schedule", lambda *_: None)


def case_and_generation(lineage: Lineage, words: dict[str, Any], name: str, passes: str = "fwd"
                        ) -> tuple[Any, Generation]:
    [case] = lineage.cases(words)
    found = lineage.generations(case, ("sm_90a", "sm_90"), 132, passes != "fwd")
    return case, next(one for one in found if (one.name, one.passes) == (name, passes))


@pytest.mark.parametrize("passes", ["fwd", "fwd+bwd"])
def test_a_job_of_attention(passes: str) -> None:
    case, generation = case_and_generation(ATTENTION, GQA, "fa2", passes)
    sets = attention.inputs(DEVICE, case)
    assert sets.places == [(0, 0), (1, 0), (2, 1)]
    job = attention.job(case, generation, sets)
    assert len(job.calls()) == len(sets.pairs)
    assert 1e-4 < job.error() < 5e-3  # one rounding to bf16
    assert job.held_bytes() == 2 * 3 * 40 * 64 * (4 + 2 + 2 + 4)


def test_the_error_finds_a_wrong_head_and_a_nan() -> None:
    case, generation = case_and_generation(ATTENTION, GQA, "fa2")
    sets = attention.inputs(DEVICE, case, past_l2=False)
    job = attention.job(case, generation, sets)
    job.calls()
    job.results[0][2, :, 3] = 0.0  # of a place that is compared
    assert 0.2 < job.error() < 0.6  # one of six parts is gone, by about the square root of a sixth
    job.results[0][0, 0, 0, 0] = float("nan")
    with pytest.raises(VerifyError, match="not finite"):
        job.error()


@pytest.mark.parametrize("words", [{"batch": 2, "cached": 100, "heads": 3}, {"batch": 1, "cached": 64, "heads": 2,
                                                                           "new": 3}], ids=["one new", "three new"])
@pytest.mark.parametrize("name", ["naive", "absorbed", "flashmla"])
def test_all_decodes_answer_the_same_question(name: str, words: dict[str, Any]) -> None:
    """Naive, absorbed and a family's call have one result, by another sum: attention over full K and V of each head."""
    case, generation = case_and_generation(DECODE, words, name)
    sets = decode.inputs(DEVICE, case, past_l2=False)
    x = sets.models[0]
    job = decode.job(case, generation, sets)
    assert len(job.calls()) == 1
    assert 1e-4 < job.error() < 2e-2
    # what is right, from the definition
    latent, rope = x.cache[:, :case.seqlen_kv].double().split((512, 64), -1)
    k = torch.cat((torch.einsum("bkc,hdc->bkhd", latent, x.w_uk.double()),
                   rope[:, :, None].expand(-1, -1, case.num_heads_q, -1)), -1)
    v = torch.einsum("bkc,hdc->bkhd", latent, x.w_uv.double())
    exact, _ = reference(x.q.double(), k, v, causal=case.seqlen_q > 1)
    for i, right in sets.right:
        torch.testing.assert_close(right, exact[i:i + 1], rtol=1e-9, atol=1e-12)


def test_bytes_that_a_decode_holds() -> None:
    case, generation = case_and_generation(DECODE, {"batch": 2, "cached": 128, "heads": 3}, "naive")
    sets = decode.inputs(DEVICE, case, past_l2=False)
    cache, weights = 2 * 128 * 576, 3 * 512 * 256
    assert decode.job(case, generation, sets).held_bytes() == 2 * (cache + weights + 2 * 3 * 192)
    case, generation = case_and_generation(DECODE, {"batch": 2, "cached": 128, "heads": 3}, "absorbed")
    assert decode.job(case, generation, sets).held_bytes() == 2 * (cache + 2 * 3 * 576)


class CpuDevice(FakeDevice):
    """Each timing is one call."""

    l2_bytes = 1

    def timed(self, timer: str, calls: Sequence[Call]) -> Run:
        return lambda: 1.0 + 0.0 * len([calls[0]()])


@pytest.mark.parametrize(("lineage", "words", "most"), [
    (ATTENTION, GQA, 5e-3), (DECODE, {"batch": 2, "cached": 100, "heads": 3}, 2e-2)], ids=["attention", "decode"])
def test_a_whole_run(lineage: Lineage, words: dict[str, Any], most: float) -> None:
    """Every generation of the registry, with the reference for its kernels."""
    results = measure(CpuDevice(), lineage, lineage.cases(words), backward=True, rounds=1)
    ran = [row for row in results["rows"] if row["status"] == "ok"]
    assert len(ran) >= 3 and all(0 < row["measured"]["error"] < most for row in ran), results["rows"]
    assert {row["status"] for row in results["rows"]} <= {"ok", "refused"}
    assert [row["why"] for row in results["rows"] if row["status"] == "refused" and not row["why"]] == []
