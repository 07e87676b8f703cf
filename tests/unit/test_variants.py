"""Variants on the emulator: shipped ones, random expressions, masks of all kinds, sinks, plain sums, tensors."""
from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from emulator_kit import failures_in_turn
from expr_strategies import DECLARED, write
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from variant_kit import FAMILIES, small, solve, spec_of

import flashgen
from flashgen.codegen.expr.evaluate import evaluate
from flashgen.codegen.expr.tree import Name, Op, walk
from flashgen.codegen.families.registry import lower
from flashgen.codegen.families.shared.launch import is_persistent
from flashgen.codegen.spec.spec import Spec, load_specs, variant_spec_paths
from flashgen.errors import SpecError
from flashgen.runtime.emulator import trace
from flashgen.runtime.emulator.schedule import Schedule, collecting, scheduled
from flashgen.runtime.ops.attention.edges import emulated_problems, tile_shape
from flashgen.runtime.ops.attention.problem import Problem
from flashgen.runtime.verify.expression_mods import BlockOffset

pytestmark = pytest.mark.slow

SHIPPED = [spec for path in variant_spec_paths() for spec in load_specs(path).specs
           if spec.dtype == "bf16" and spec.head_dim_qk == 64
           and spec.family != "triton" and (spec.family == "fa3") == (
               spec.kv_layout == "varlen" or path.stem in ("document", "block_sparse"))
           and spec.causal == (path.stem in ("alibi", "differential", "softcap"))]


@pytest.mark.parametrize("number, spec", [*enumerate(SHIPPED)], ids=[spec.variant for spec in SHIPPED])
def test_shipped(number: int, spec: Spec) -> None:
    """As `flashgen verify` would, on the problem with the most tiles; policies take turns, with values for params."""
    plan = lower(spec)
    chosen = list(emulated_problems(spec, *tile_shape(plan), 1, persistent=is_persistent(plan)))[:1]
    failures = failures_in_turn(spec, number, chosen)
    assert not failures, failures[0]


# ---- random expressions

def drawn(seed: int, kind: str, varlen: bool) -> str:
    """An expression without special functions, which tests of values have, that a call of this layout can read."""
    text = write(random.Random(seed), kind, 3, special=False)
    return text.replace("keep[q_pos, kv_pos]", "(table[kv_pos] < q_pos)") if varlen else text.replace("doc[", "table[")


def is_steady(spec: Spec, inputs: Any) -> bool:
    """Whether float32 evaluates the expressions as float64 does: no comparison on a knife's edge, no cancellation."""
    for tree in (spec.expressions.score, spec.expressions.mask):
        conditions = [] if tree is None else [
            node for side in walk(tree) if isinstance(side, Op) and side.op in ("lt", "le", "eq", "ne")
            for node in walk(side)]
        if any((isinstance(node, Name) and node.name == "score") or node.type == "float" for node in conditions):
            return False
    if spec.expressions.score is None:
        return True
    rows, keys = 70, 70
    scores = torch.randn(2, 2, 1, rows, keys, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    at = BlockOffset(rows, keys)
    env = inputs.mods
    exact, single = (env.score_mod(at, scores, dtype) for dtype in ("float64", "float32"))
    return bool(exact.isfinite().all() and (exact - single).abs().max() < 1e-5)


@settings(max_examples=10, deadline=None, phases=(Phase.generate,), suppress_health_check=list(HealthCheck),
          derandomize=True)
@given(st.integers(0, 2**32), st.booleans(), st.sampled_from(["score", "mask", "both"]), st.sampled_from(FAMILIES))
def test_random_expressions(seed: int, varlen: bool, kinds: str, family: str) -> None:
    texts = {kind: drawn(seed + len(kind), kind, varlen) for kind in ("score", "mask") if kinds in (kind, "both")}
    if "score" in texts:
        texts["score"] = f"4 * tanh(({texts['score']}) / 16)"
    problem = (Problem(2, (70, 45), (70, 90), 2, 2, tail=3, seed=seed % 1000) if varlen
               else Problem(2, 70, 100, 2, 2, seed=seed % 1000))
    try:
        variant = small(family, **texts, params={name: DECLARED[name] for name in DECLARED
                                                 if any(name in text for text in texts.values())},
                        kv_layout="varlen" if varlen else "dense")
    except SpecError as error:
        assume(not any(word in error.what for word in ("too large", "outside", "zero")))
        raise
    inputs = problem.make_inputs()
    assume(is_steady(spec_of(variant, problem), inputs.with_mods(spec_of(variant, problem), seed=problem.seed)))
    solve(variant, problem, policies=("random",))


# ---- masks: every role and loop phase, dense and varlen

MASKS: list[tuple[str, dict[str, Any]]] = [
    ("kv_pos <= q_pos and (q_pos - kv_pos < window or kv_pos < 3)", {"window": {"type": "int", "default": 40}}),
    ("kv_pos // 48 == q_pos // 48", {}), ("(q_pos - kv_pos) % 3 == 0 and kv_pos <= q_pos", {}),
    ("kv_pos <= q_pos or kv_pos < prefix[batch]",
     {"prefix": {"type": "tensor", "dtype": "int32", "shape": ["batch"]}}),
    ("kv_pos > q_pos + 30", {}), ("kv_pos == 150 or kv_pos == 33", {}), ("head_q == 1 and kv_pos <= q_pos", {}),
    ("q_pos >= 64 and kv_pos % 64 < 5", {}), ("False", {})]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("mask", "params"), MASKS, ids=[mask[:24] for mask, _ in MASKS])
def test_masks(family: str, mask: str, params: dict[str, Any]) -> None:
    """First, last, only, whole, masked and missing tiles; rows that meet their first key late or never; NaN in V."""
    variant = small(family, mask=mask, params=params)
    for number, problem in enumerate((Problem(1, 150, 210, 2, 1), Problem(1, 1, 250, 2, 1), Problem(1, 130, 64, 2, 2),
                                      Problem(4, (70, 0, 5, 130), (170, 9, 0, 130), 2, 1, tail=4))):
        solve(variant, problem, nans=bool(number % 2), policies=("random",))
    if "//" in mask or "or" in mask:  # what runs ahead and what falls behind, for two kinds of walks
        solve(variant, Problem(1, 140, 170, 2, 1, softmax_scale=1.0), policies=("eager", "lazy"))


COPY = trace.KINDS.index("copies")


@pytest.mark.parametrize(("mask", "keys"), [
    ("kv_pos <= q_pos and (q_pos - kv_pos < 40 or kv_pos < 3)", 900), ("kv_pos // 100 == q_pos // 100", 900),
    ("(kv_pos <= q_pos or kv_pos < 70) and kv_pos % 200 < 33", 900), ("kv_pos == 500 and head_q < 9", 900),
    ("abs(q_pos - kv_pos) % 400 < 20", 900),
    # More than 64 tiles: by runs. Hidden at both ends, of two runs that lie apart, of all.
    ("kv_pos // 1000 == 4 and q_pos > 8500", 9000), ("kv_pos < 3 or kv_pos == 5000 or q_pos == kv_pos", 9001),
    ("kv_pos % 3000 < 40", 2049), ("q_pos == 3 and kv_pos % 2 == 0", 70000)])
def test_every_hidden_tile_is_skipped(mask: str, keys: int) -> None:
    """What the producer copies of a query tile is, key tile for key tile, what some row sees: once as keys, once as
    values."""
    problem, rows, tile_n = Problem(1, 64, keys), 64, 32
    variant, inputs = small("fa3", mask=mask), problem.make_inputs()
    assert dict(lower(spec_of(variant, problem)).slots)["mask"] == "expression"
    with scheduled(Schedule("eager", resident=1, traced_block=0)), collecting() as statistics:
        flashgen.attention(inputs.q, inputs.k, inputs.v, spec=variant)
    copies = sum(1 for row, kind, *_ in statistics[0].trace if (row, kind) == (0, COPY))
    tree = spec_of(variant, problem).expressions.mask
    assert tree is not None
    seen = evaluate(tree, {"q_pos": np.arange(rows)[:, None] + keys - rows, "kv_pos": np.arange(keys)[None, :],
                           "head_q": 0}, np)
    tiles = {int(key) // tile_n for key in np.nonzero(seen)[1]}
    assert copies == 2 * max(len(tiles), 1)  # one for the pipeline, where nobody sees anything


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mask", ["kv_pos <= q_pos and q_pos - kv_pos < window", "abs(kv_pos - q_pos) <= window",
                                  "kv_pos >= window", "kv_pos + 2 < seqlen_kv - window and kv_pos > q_pos - 40"])
def test_intervals(family: str, mask: str) -> None:
    """Windows as expressions, with windows of any size: what an int cannot hold, 64 bits do."""
    variant = small(family, mask=mask, params={"window": {"type": "int"}})
    for number, window in enumerate((40, 0, 1, -5, 2**31 - 1, -2**31, 130)):
        problem = (Problem(1, 150, 170, 2, 1) if number % 2 else
                   Problem(3, (70, 9, 1), (60, 130, 0), 2, 1, tail=4))
        solve(variant, problem, {"window": window}, nans=number > 1, policies=("random",))


@pytest.mark.parametrize("changes", [{"roles": {"mma": 16}, "tile": {"m": 256, "n": 32}}, {"q_stages": 1},
                                     {"roles": {"mma": 4}, "tile": {"m": 64, "n": 16}, "stages": 3},
                                     {"schedule": "overlap", "kv_layout": "varlen"}], ids=str)
def test_fa3_shapes(changes: dict[str, Any]) -> None:
    """Pingpong, one and four warpgroups, output beside the queries."""
    variant = small("fa3", mask=MASKS[0][0], params=MASKS[0][1], sink="per_head", **changes)
    problem = (Problem(2, (150, 20), (170, 60), 2, 1) if "kv_layout" in changes else Problem(1, 300, 310, 2, 1))
    solve(variant, problem, nans=True)
    solve(variant, problem)


@pytest.mark.parametrize("family", FAMILIES)
def test_top_left(family: str) -> None:
    solve(small(family, "score + 0.01 * (kv_pos - q_pos)", "kv_pos <= q_pos + 40", align="top_left"),
          Problem(1, 70, 200, 2, 1))
    solve(small(family, "score + 0.01 * (kv_pos - q_pos)", causal=True), Problem(1, 70, 200, 2, 1, causal="top_left"))


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_under_built_in_masks(family: str) -> None:
    cap = {"cap": {"type": "float", "default": 3.0}}
    variant = small(family, "cap * tanh(score / cap)", params=cap, window=True)
    solve(variant, Problem(1, 130, 150, 2, 1, window=(20, 5)), {"cap": 1.5}, nans=True)
    solve(variant, Problem(1, 130, 150, 2, 1, causal=True))
    solve(small(family, "cap * tanh(score / cap)", params=cap, causal=True, sink="per_head"),
          Problem(2, (70, 60), (90, 60), 2, 1, causal=True), nans=True)
    solve(small(family, "cap * tanh(score / cap)", params=cap), Problem(1, 130, 150, 2, 1, dtype="fp16"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sink", [0.0, 40.0, -200.0, -torch.inf])
def test_sinks(family: str, sink: float) -> None:
    """Far above and far below the scores, and none at all; rows without a key have the sink alone in lse."""
    sinks = {"sink": torch.tensor([sink, 1.0])}
    solve(small(family, sink="per_head"), Problem(1, 70, 150, 2, 1, softmax_scale=1.0), sinks)
    solve(small(family, mask="kv_pos < q_pos - 20", sink="per_head"), Problem(2, (70, 9), (90, 0), 2, 1, tail=3), sinks)
    if sink == 0.0:
        solve(small(family, sink="per_head"), Problem(1, 5, 0, 2, 1), sinks)


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_sums(family: str) -> None:
    for mask in ("none", "kv_pos <= q_pos + 3"):
        variant = small(family, "sigmoid(score - 3)", mask, normalize="none")
        solve(variant, Problem(1, 130, 150, 2, 1), nans=mask != "none")
        solve(variant, Problem(3, (70, 0, 3), (90, 8, 0), 2, 1, tail=2))


@pytest.mark.parametrize("family", FAMILIES)
def test_documents(family: str) -> None:
    """Ids that never fall are bounded by their ends; others are looked at one by one. The same answer either way."""
    ids = torch.from_numpy(np.repeat(np.arange(5), [50, 3, 80, 1, 66]).astype(np.int32))
    for is_sorted in (True, False):
        doc = {"type": "tensor", "dtype": "int32", "shape": ["total_kv"], "sorted": is_sorted}
        variant = small(family, mask="doc[q_pos] == doc[kv_pos] and kv_pos <= q_pos", params={"doc": doc},
                        kv_layout="varlen")
        solve(variant, Problem(2, (120, 80), (120, 80), 2, 1), {"doc": ids}, nans=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_of_bools(family: str) -> None:
    """A map of blocks, a padding mask, and a tree."""
    rng = torch.Generator().manual_seed(2)
    for mask, shape in (("m[q_pos // 64, kv_pos // 32]", [4, 8]), ("m[batch, kv_pos]", ["batch", "seqlen_kv"]),
                        ("m[q_pos - 150, kv_pos - 150] if kv_pos >= 150 else True", [50, 50])):
        variant = small(family, mask=mask, kv_layout="dense",
                        params={"m": {"type": "tensor", "dtype": "bool", "shape": shape}})
        sizes = [{"batch": 2, "seqlen_kv": 200}.get(dim, dim) if isinstance(dim, str) else dim for dim in shape]
        values = torch.rand(sizes, generator=rng) < 0.5
        solve(variant, Problem(2, 90, 200, 2, 1), {"m": values}, nans=True, policies=("random",))


