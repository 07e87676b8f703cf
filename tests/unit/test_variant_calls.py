"""Calls of variants: values that come and go without a build, what is refused and where, kernels of one meaning."""
from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from test_expr import BAD_PARAMS, PARAMS, REFUSED
from torch.utils._python_dispatch import TorchDispatchMode
from variant_kit import counted_builds, small, solve, spec_of

import flashgen
from flashgen.codegen import render as rendering
from flashgen.codegen.expr.tree import TensorParam
from flashgen.codegen.families.registry import fastest_first, lower
from flashgen.codegen.plan import Plan
from flashgen.codegen.render import plan_and_source
from flashgen.codegen.spec.spec import load_specs, specs_from_mapping, variant_spec_paths
from flashgen.errors import SpecError, UnsupportedError
from flashgen.runtime.ops.attention.problem import Problem
from flashgen.runtime.select import lookup
from flashgen.runtime.select.selector import selector, serving

BASE = {"name": "v", "family": "fa2", "pass": "fwd", "arch": "sm_90", "dtype": "bf16", "head_dim_qk": 64}
CAP = {"cap": {"type": "float", "default": 30.0}}
SLOPE = {"slope": {"type": "tensor", "dtype": "float32", "shape": ["num_heads_q"]}}
DECLARED = {name: {"type": "tensor", "dtype": p.dtype,
                   "shape": ["seqlen_kv" if dim == "total_kv" else dim for dim in p.shape]}
            if isinstance(p, TensorParam) else {"type": p.type} for name, p in PARAMS.items()}


def qkv(problem: Problem) -> tuple[torch.Tensor, ...]:
    inputs = problem.make_inputs()
    return inputs.q, inputs.k, inputs.v


# ---- refused, and never compiled

HOSTILE = [(kind, text) for kind, text, _, _ in REFUSED]


@pytest.mark.parametrize(("kind", "text"), HOSTILE, ids=lambda value: ascii(value)[:24])
def test_hostile_expressions(kind: str, text: str) -> None:
    """A spec and flashgen.variant refuse them with the place, before anything is rendered."""
    assert len(HOSTILE) >= 60
    with mock.patch.object(rendering, "render", side_effect=AssertionError):
        for make in (lambda: specs_from_mapping(BASE | {kind: text, "params": DECLARED}),
                     lambda: flashgen.variant(**{kind: text}, params=DECLARED)):
            with pytest.raises(SpecError) as caught:
                make()
            error = caught.value
            assert kind in error.where.split(":")[0] and (error.allowed or "characters" in error.what)
            assert "\n" not in error.what and error.what.isprintable()


def test_places_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: v\nfamily: fa2\npass: fwd\narch: sm_90\ndtype: bf16\nhead_dim_qk: 64\n"
                    "params:\n  cap: {type: float}\n  bias: {type: tensor, dtype: float64, shape: [4]}\n")
    with pytest.raises(SpecError) as caught:
        load_specs(path)
    assert caught.value.where == f"{path}:9:31" and caught.value.nearest == "float32"
    path.write_text(path.read_text().replace("float64", "float32") + "score: bias[head_q] + scoer\n")
    with pytest.raises(SpecError) as caught:
        load_specs(path)
    assert caught.value.where == f"{path}:10:8:16" and caught.value.nearest == "score"


@pytest.mark.parametrize(("declared", "where", "words"), BAD_PARAMS)
def test_hostile_params(declared: Any, where: str, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        flashgen.variant("score", params=declared or [1])
    assert caught.value.where.startswith("variant.params") or caught.value.where.startswith("Spec.params")


RULES: list[tuple[dict[str, Any], str]] = [
    ({"mask": "kv_pos <= q_pos", "causal": True}, "mask"), ({"mask": "True", "window": True}, "mask"),
    ({"normalize": "none"}, "lse"), ({"normalize": "none", "lse": False, "sink": "per_head"}, "sink"),
    ({"align": "top_left"}, "align"), ({"align": "top_left", "score": "score + q_pos", "causal": True}, "align"),
    ({"score": "2 * score", "split": True, "family": "fa3", "arch": "sm_90a"}, "split"),
    ({"sink": "per_head", "pack_gqa": True, "family": "fa3", "arch": "sm_90a"}, "pack_gqa"),
    ({"sink": "per_head", "params": {"sink": {"type": "float"}}, "score": "score * sink"}, "params.sink"),
    ({"params": CAP}, "params.cap"),
    ({"score": "score + b[kv_pos]", "params": {"b": {"type": "tensor", "dtype": "float32", "shape": ["total_kv"]}}},
     "params.b.shape"),
    ({"score": "score + b[kv_pos]", "kv_layout": "varlen",
      "params": {"b": {"type": "tensor", "dtype": "float32", "shape": ["seqlen_kv"]}}}, "params.b.shape"),
    ({"score": "score + b[kv_pos]",
      "params": {"b": {"type": "tensor", "dtype": "float32", "shape": ["seqlen_kv"], "sorted": True}}},
     "params.b.sorted"),
]


@pytest.mark.parametrize(("fields", "where"), RULES, ids=[str(i) for i in range(len(RULES))])
def test_rules_between_fields(fields: dict[str, Any], where: str) -> None:
    with pytest.raises(SpecError) as caught:
        specs_from_mapping(BASE | fields)
    assert caught.value.where in (f"spec.{where}", "spec") and caught.value.allowed


def test_values_that_do_not_fit() -> None:
    problem = Problem(1, 5, 9, 2, 1)
    tensors = qkv(problem)
    variant = small("fa2", "score * gain - slope[head_q]", params={"gain": {"type": "float"}, **SLOPE})
    slope = torch.zeros(2)
    for params, where, words in (
            (None, "'gain'", "missing"), ({"gain": 1.0}, "'slope'", "missing"), ({"gain": True}, "'gain'", "True"),
            ({"gain": 1.0, "slope": slope, "slop": 1}, "'slop'", "no parameter"),
            ({"gain": "1", "slope": slope}, "'gain'", "1"), ({"gain": float("nan"), "slope": slope}, "'gain'", "nan"),
            ({"gain": 1.0, "slope": 2.0}, "'slope'", "2.0"),
            ({"gain": 1.0, "slope": slope.half()}, "'slope'", "float16"),
            ({"gain": 1.0, "slope": torch.zeros(3)}, "'slope'", "(3,)"),
            ({"gain": 1.0, "slope": torch.zeros(4)[::2]}, "'slope'", "strides"),
            ({"gain": 1.0, "slope": slope.to("meta")}, "'slope'", "meta")):
        with pytest.raises(UnsupportedError) as caught:
            flashgen.attention(*tensors, spec=variant, params=params)
        assert where in caught.value.where and words in caught.value.what, caught.value
    with pytest.raises(UnsupportedError, match="without a spec"):
        flashgen.attention(*tensors, params={"gain": 1.0})
    with pytest.raises(UnsupportedError, match="no parameter"):
        flashgen.attention(*tensors, spec="fa2_fwd", params={"gain": 1.0})
    with pytest.raises(UnsupportedError, match="mask is an expression"):
        flashgen.attention(*tensors, spec=small("fa2", mask="kv_pos <= q_pos"), causal=True)


# ---- values come and go without a build

def test_new_values_build_nothing() -> None:
    problem = Problem(1, 40, 60, 2, 1)
    variant = small("fa2", "cap * tanh(score / cap) - slope[head_q] * abs(q_pos - kv_pos)",
                    "kv_pos <= q_pos and q_pos - kv_pos < window or flag",
                    params={**CAP, **SLOPE, "window": {"type": "int"}, "flag": {"type": "bool", "default": False}})
    with counted_builds() as built:
        outs = [solve(variant, problem, policies=("random",), params={
                    "cap": cap, "window": window, "slope": torch.tensor([slope, 0.1]), "flag": flag})
                for cap, window, slope, flag in ((30.0, 10, 0.5, False), (2.0, 10, 0.5, False), (2.0, 3, 0.5, False),
                                                 (2.0, 3, 0.0, False), (2.0, 3, 0.0, True))]
    assert len(built) == 1
    assert len({out.float().sum().item() for out in outs}) == len(outs)


def test_one_kernel_for_one_meaning() -> None:
    """The canonical form is what is built and named: a + b and b + a, other defaults, unused declarations."""
    one = small("fa2", "score + cap * q_pos", "kv_pos <= q_pos and kv_pos >= 3", params=CAP)
    two = small("fa2", "q_pos * cap + score", "not kv_pos > q_pos and not kv_pos < 3",
                params={"cap": {"type": "float", "default": 1.0}, **SLOPE})
    other = small("fa2", "score - cap * q_pos", "kv_pos <= q_pos and kv_pos >= 3", params=CAP)
    problem = Problem(1, 5, 9)
    plans = [plan_and_source(spec_of(variant, problem)) for variant in (one, two, other)]
    assert plans[0] == plans[1] and plans[0][0].variant != plans[2][0].variant
    ids = small("fa3", mask="ids[q_pos] == ids[kv_pos]", kv_layout="varlen", params={
        "ids": {"type": "tensor", "dtype": "int32", "shape": ["total_kv"], "sorted": True}})
    for plan in (plans[0][0], lower(spec_of(ids, Problem(2, (5, 5), (5, 5))))):
        assert Plan.from_json(plan.to_json()) == plan and plan.expressions


def test_masks_with_bounds_of_their_own() -> None:
    problem = Problem(1, 5, 9)
    window = {"window": {"type": "int"}}
    for mask, choice in (("kv_pos <= q_pos", "causal"), ("not q_pos < kv_pos", "causal"), ("True", "full"),
                         ("kv_pos <= q_pos and head_q < 3", "expression"),
                         ("kv_pos <= q_pos and q_pos - kv_pos < window", "interval"),
                         ("abs(q_pos - kv_pos) <= window", "interval"), ("-window <= kv_pos - q_pos <= 3", "interval"),
                         ("kv_pos < seqlen_kv // 2 + window", "interval"), ("q_pos - 7 < kv_pos", "interval"),
                         # What a sum with a parameter wraps to, it hides; and these move left, or are two intervals.
                         ("kv_pos < q_pos + window", "expression"), ("q_pos + kv_pos < window", "expression"),
                         ("kv_pos < q_pos or kv_pos < window", "expression"), ("kv_pos < head_q", "expression")):
        for family in ("fa2", "fa3"):
            variant = small(family, mask=mask, params=window if "window" in mask else {})
            assert dict(lower(spec_of(variant, problem)).slots)["mask"] == choice


def test_no_call_gets_a_variant_unasked() -> None:
    """Their selectors differ from all that a call without a spec asks for."""
    wanted = lookup.Wanted("bf16", 64, 64, True, False, "dense", True)
    asked = [s for family in fastest_first("attention") for s in serving(wanted, "sm_90a", family)]
    for path in variant_spec_paths():
        for spec in load_specs(path).specs:
            if path.stem != "differential":
                assert selector(spec.fields(), spec.arch).score != "none"
            assert selector(spec.fields(), spec.arch) not in asked or path.stem == "differential"
    assert not {path.stem for path in variant_spec_paths()} & {s.name for s in lookup._shipped().values()}


def test_through_the_dispatcher() -> None:
    """Where somebody listens, tensors pass through ops of their own; fake ones give shapes."""
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            names.append(str(function))
            return function(*args, **(kwargs or {}))

    names: list[str] = []
    q, k, v = qkv(Problem(1, 20, 30, 2, 1))
    variant, params = small("fa2", "score - slope[head_q]", params=SLOPE, sink="per_head"), {
        "slope": torch.ones(2), "sink": torch.zeros(2)}
    plain, plain_lse = flashgen.attention(q, k, v, spec=variant, params=params, return_lse=True)
    with Seen():
        out, lse = flashgen.attention(q, k, v, spec=variant, params=params, return_lse=True)
        again = flashgen.attention(q, k, v, spec=variant, params=params, out=torch.empty_like(q))
    assert torch.equal(out, plain) and torch.equal(lse, plain_lse) and torch.equal(again, plain)
    assert "flashgen.attention_lse.default" in names and "flashgen.attention_out.default" in names
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = flashgen.attention(mode.from_tensor(q), mode.from_tensor(k), mode.from_tensor(v), spec=variant,
                                  params={name: mode.from_tensor(t) for name, t in params.items()})
    assert fake.shape == q.shape


def test_by_file_and_by_name(tmp_path: Path) -> None:
    q, k, v = qkv(Problem(1, 20, 30, 2, 1))
    shipped = flashgen.attention(q, k, v, spec="window_sinks", params={"window": 5, "sink": torch.zeros(2)})
    made = flashgen.attention(
        q, k, v, params={"window": 5, "num_sink": 4, "sink": torch.zeros(2)}, spec=small(
            "fa2", mask="kv_pos <= q_pos and (q_pos - kv_pos < window or kv_pos < num_sink)", sink="per_head",
            params={"window": {"type": "int"}, "num_sink": {"type": "int"}}))
    torch.testing.assert_close(shipped, made, atol=2e-2, rtol=2e-2)
