"""The truth of gradients, and what `flashgen verify` makes of kernels that are right, wrong or not the same twice."""
from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from backward_kit import FakeKernel, fake_kernels
from torch import Tensor

from flashgen.codegen.spec.spec import Spec
from flashgen.errors import VerifyError
from flashgen.runtime.ops.attention_backward import call, edges, op
from flashgen.runtime.ops.attention_backward.problem import BackwardInputs, BackwardProblem, by_name
from flashgen.runtime.verify import gradients as truth
from flashgen.runtime.verify import verify
from flashgen.runtime.verify.compare import check
from flashgen.runtime.verify.gradients import gradients
from flashgen.runtime.verify.reference import reference
from flashgen.runtime.verify.subject import Subject

TILES = (16, 8)
PROBLEMS = (
    BackwardProblem(2, 33, 45, 4, 2, 32, 16), BackwardProblem(2, 33, 45, 4, 2, 32, 16, True, lse_gradient=True),
    BackwardProblem(1, 33, 45, 3, 1, 16, 16, False, (3, 2), lse_gradient=True),
    BackwardProblem(1, 45, 20, 1, 1, 16, 32, "top_left", dtype="fp16", softmax_scale=1.0),
    BackwardProblem(1, 45, 20, 2, 1, 16, 16, True, lse_gradient=True))
VARLEN = BackwardProblem(3, (5, 0, 9), (3, 4, 2), 2, 1, 16, 16, True, tail=2, lse_gradient=True)


def rounded(x: BackwardInputs, **changes: Any) -> dict[str, Tensor]:
    found = gradients(x.dout, x.q, x.k, x.v, **x.keywords)
    return {name: t.to(x.q.dtype) for name, t in by_name(found).items()} | changes


# ---- the truth

@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.label)
@pytest.mark.parametrize("chunk", [1 << 24, 100])
def test_truth_is_what_autograd_makes_of_the_reference(problem: BackwardProblem, chunk: int,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(truth, "CHUNK_SCORES", chunk)  # a few rows at a time
    x = problem.make_inputs()
    leaves = [t.double().requires_grad_() for t in (x.q, x.k, x.v)]
    out, lse = reference(*leaves, **{name: value for name, value in x.keywords.items() if name != "dlse"})
    loss = (out * x.dout).sum()
    if x.dlse is not None:
        loss = loss + (lse.masked_fill(lse.isneginf(), 0.0) * x.dlse).sum()
    for found, right in zip(gradients(x.dout, x.q, x.k, x.v, **x.keywords), torch.autograd.grad(loss, leaves),
                            strict=True):
        torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)
    check(rounded(x), x)


def test_truth_of_sequences_is_that_of_each() -> None:
    x = VARLEN.make_inputs()
    found = rounded(x)
    for i in (0, 2):
        for name, part in rounded(op._request(x, i)).items():
            assert torch.equal(op._rows(name, found[name], x, i), part)
    assert all(found[name][-2:].eq(0).all() for name in found)  # B017: behind the last sequence
    assert not any(t.isnan().any() for t in found.values())


def test_seeds() -> None:
    x, again = (PROBLEMS[1].make_inputs() for _ in range(2))
    assert all(map(torch.equal, x.tensors, again.tensors)) and torch.equal(x.dlse, again.dlse)
    other = BackwardProblem(2, 33, 45, 4, 2, 32, 32, True, seed=1).make_inputs()
    assert not torch.equal(other.dout, other.q) and not torch.equal(other.q[:1], x.q[:1])
    assert repr(PROBLEMS[1]) == repr(eval(repr(PROBLEMS[1])))


@pytest.mark.parametrize("name", ["dq", "dk", "dv"])
def test_what_is_wrong_is_told(name: str) -> None:
    x = PROBLEMS[1].make_inputs()
    right = rounded(x)[name]
    off = right.clone()
    off[1, 7] *= 1.1
    wrong = {"one row a tenth off": off, "without the scale": right / 32 ** -0.5, "swapped": right.flip(1),
             "NaN": right.where(torch.arange(right.shape[1])[:, None, None] != 3, float("nan")),
             "float": right.float(), "shape": right[:, :-1]}
    for what, value in wrong.items():
        if (name, what) != ("dv", "without the scale"):
            with pytest.raises(VerifyError, match=f"{name} "):
                check(rounded(x, **{name: value}), x)


def test_a_forgotten_gradient_of_lse_is_told() -> None:
    x = PROBLEMS[1].make_inputs()
    with pytest.raises(VerifyError):
        check(rounded(x.with_(dlse=None)), x)


# ---- verify, over kernels that the reference plays

@pytest.fixture
def subjects(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    fake_kernels(monkeypatch)
    monkeypatch.setattr(edges, "tile_shape", lambda plan: TILES)
    monkeypatch.setattr(op, "lower", lambda spec: None)
    monkeypatch.setattr(verify, "op_of", lambda spec: op)
    monkeypatch.setattr(call, "_handle", lambda text: "")
    monkeypatch.setattr(op.flashgen, "attention_backward",
                        lambda *x, spec=None, **more: call.attention_backward(*x, **more), raising=False)

    def make(layout: str, causal: bool = False, window: bool = False) -> Subject:
        spec: Any = SimpleNamespace(kv_layout=layout, causal=causal, window=window, head_dim_qk=16, head_dim_v=8,
                                    dtype="bf16", variant="x", arch="sm_90", name="x", family="fa2", pass_="bwd",
                                    score="none", mask="none", sink="none", normalize="softmax")
        return Subject(spec, "cpu", 3)

    yield make


PLAN: Any = SimpleNamespace(step="gradients")


@pytest.mark.parametrize("layout", ["dense", "varlen"])
@pytest.mark.parametrize("causal", [False, True])
def test_right_kernels_pass(layout: str, causal: bool, subjects: Any) -> None:
    subject = subjects(layout, causal)
    for emulated in (False, True):
        for problem in op.problems(subject.spec, PLAN, 1, emulated):
            if problem.num_heads_q < 45:  # of many tiles, too many for the reference here
                verify.against_reference(subject, problem)
    names = set()
    for name, identity, problem in op.identities(subject.spec, PLAN, 1):
        identity(subject, problem)
        names.add(name)
    assert names == set(op.IDENTITIES)


def test_kernels_beside_the_main_one_have_few_problems(subjects: Any) -> None:
    spec, beside = subjects("dense", True).spec, SimpleNamespace(step="preprocess")
    assert len([*op.problems(spec, beside, 1, False)]) == op.FEW < len([*op.problems(spec, PLAN, 1, False)])
    assert not [*op.identities(spec, beside, 1)]
    assert {problem.lse_gradient for problem in op.problems(spec, beside, 1, True)} == {False, True}


def broken(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """A kernel whose results `change` gets to see."""
    launcher = FakeKernel.launcher

    def changed(self: FakeKernel, step: Any) -> Any:
        launch = launcher(self, step)

        def both(x: dict[str, Tensor], filled: set[str]) -> None:
            launch(x, filled)
            if step.kernel == "gradients":
                change(x)
        return both

    monkeypatch.setattr(FakeKernel, "launcher", changed)


def flip_a_bit(x: Tensor) -> None:
    """The last bit of its first element."""
    x.view(torch.int16).flatten()[:1].bitwise_xor_(1)


@pytest.mark.parametrize("name, found", [("dq", False), ("dk", True), ("dv", True)])
def test_only_dq_may_differ_from_run_to_run(name: str, found: bool, subjects: Any, monkeypatch: pytest.MonkeyPatch
                                            ) -> None:
    runs: list[int] = []
    broken(monkeypatch, lambda x: (runs.append(1), len(runs) % 2 or flip_a_bit(x[name])))
    subject, problem = subjects("dense"), BackwardProblem(1, 20, 30, 1, 1, 16, 8)
    if found:
        with pytest.raises(VerifyError, match=f"{name} \\(another run\\)"):
            verify.against_reference(subject, problem)
    else:
        verify.against_reference(subject, problem)
    assert len(runs) == 2


def test_a_second_run_of_dq_is_judged_too(subjects: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    broken(monkeypatch, lambda x: (runs.append(1), len(runs) % 2 or x["dq"].mul_(1.5)))
    with pytest.raises(VerifyError, match="dq at"):
        verify.against_reference(subjects("dense"), BackwardProblem(1, 20, 30, 1, 1, 16, 8))


@pytest.mark.parametrize("identity, change", [
    ("alone and in company", lambda x: x["q"].isnan().any() and x["dk"].add_(1.0)),
    ("strided", lambda x: x["v"].is_contiguous() or flip_a_bit(x["dv"])),
    ("another order", lambda x: flip_a_bit(x["dk"])),
    ("rows without keys", lambda x: x["dq"].add_(1e-30))])
def test_identities_tell(identity: str, change: Any, subjects: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, change)
    subject = subjects("dense", True)
    problems = [problem for name, _, problem in op.identities(subject.spec, PLAN, 1) if name == identity]
    with pytest.raises(VerifyError):
        for problem in problems:
            op.IDENTITIES[identity](subject, problem)


EXPRESSIONS: dict[str, dict[str, Any]] = {
    "score": {"score": "0.7 * tanh(score) + bias[head_q, kv_pos] * score",
              "params": {"bias": {"type": "tensor", "dtype": "float32", "shape": ["num_heads_q", 9]}}},
    "mask": {"mask": "kv_pos <= q_pos and (q_pos - kv_pos < 5 or kv_pos == batch)"},
    "sink": {"score": "score - 0.1 * abs(q_pos - kv_pos)", "sink": "per_head", "causal": True},
    "constant": {"score": "0.5 * float(kv_pos % 3) + 0.0 * score", "mask": "kv_pos != 1"},
}


@pytest.mark.parametrize("name", EXPRESSIONS)
@pytest.mark.parametrize("problem", [PROBLEMS[1], VARLEN], ids=["dense", "varlen"])
def test_truth_of_expressions(name: str, problem: BackwardProblem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(truth, "CHUNK_SCORES", 100)
    spec = Spec(name="x", family="fa2", pass_="bwd", arch="sm_90", kernel="gradients", dtype="bf16",
                kv_layout="varlen" if problem is VARLEN else "dense", head_dim_qk=problem.head_dim_qk,
                head_dim_v=problem.head_dim_v, **EXPRESSIONS[name])
    x = problem.make_inputs().with_mods(spec)
    x = x.with_(causal=spec.causal)
    leaves = [t.double().nan_to_num(0.0).requires_grad_() for t in (x.q, x.k, x.v)]
    meaning = {name: value for name, value in x.meaning.items() if name != "dlse"}
    out, lse = reference(*leaves, **meaning)
    assert x.dlse is not None
    loss = (out * x.dout.nan_to_num(0.0)).sum() + torch.where(lse.isneginf(), 0.0, lse * x.dlse.nan_to_num(0.0)).sum()
    for found, right in zip(gradients(x.dout, x.q, x.k, x.v, **x.meaning), torch.autograd.grad(loss, leaves),
                            strict=True):
        torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)
    found = gradients(x.dout, x.q, x.k, x.v, **x.meaning)
    check({name: t.to(x.q.dtype) for name, t in by_name(found).items()}, x)
