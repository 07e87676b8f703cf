"""q_index: a query's own row, however positions are aligned, in scores and masks of both families."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from variant_kit import FAMILIES, small, solve

import flashgen
from flashgen.codegen.explain.check import check
from flashgen.codegen.expr.canon import canonical
from flashgen.codegen.expr.parse import parse
from flashgen.errors import SpecError
from flashgen.runtime.ops.attention.problem import Problem

BIAS = {"b": {"type": "tensor", "dtype": "float32", "shape": ["seqlen_q", "seqlen_kv"]}}
KEEP = {"keep": {"type": "tensor", "dtype": "bool", "shape": ["seqlen_q", "seqlen_kv"]}}
LENGTHS = [(5, 70), (70, 5), (33, 33), (1, 40)]


def attended(problem: Problem, scores: torch.Tensor | None = None, keep: torch.Tensor | None = None) -> torch.Tensor:
    """Softmax in fp64 with a bias or a mask of [seqlen_q, seqlen_kv], without the evaluator of expressions."""
    x = problem.make_inputs()
    q, k, v = (t.double().transpose(1, 2) for t in (x.q, x.k, x.v))
    s = q @ k.transpose(-1, -2) * problem.head_dim_qk**-0.5
    s = s if scores is None else s + scores.double()
    s = s if keep is None else s.masked_fill(~keep, -torch.inf)
    return (s.softmax(-1).nan_to_num(0.0) @ v).transpose(1, 2)


def near(out: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(out.double(), expected, atol=2**-7, rtol=2**-6)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("rows", "keys"), LENGTHS)
def test_a_bias_with_a_row_for_each_query(family: str, rows: int, keys: int) -> None:
    """A bias read by q_pos had the last row for every query where there are fewer queries than keys."""
    problem, bias = Problem(2, rows, keys, 2, 1), torch.randn(rows, keys) * 4
    variant = small(family, "score + b[q_index, kv_pos]", params=BIAS)
    out = solve(variant, problem, {"b": bias}, policies=("random",))
    assert near(out, attended(problem, bias))
    if rows < keys and rows > 1:
        by_position = small(family, "score + b[q_pos, kv_pos]", params=BIAS)
        assert not near(solve(by_position, problem, {"b": bias}, policies=("random",)), attended(problem, bias))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("align", ["bottom_right", "top_left"])
def test_a_mask_with_a_row_for_each_query(family: str, align: str) -> None:
    """Exact where tiles are skipped: a block of rows sees nothing of some tiles of keys, and all of others."""
    problem = Problem(1, 70, 150, 2, 2)
    keep = torch.rand(70, 150) < 0.5
    keep[:, 32:64], keep[:64, 96:128] = False, True
    variant = small(family, mask="keep[q_index, kv_pos]", params=KEEP, align=align)
    assert near(solve(variant, problem, {"keep": keep}, nans=False), attended(problem, keep=keep))
    solve(variant, problem, {"keep": keep}, nans=True)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mask", ["kv_pos <= q_index", "q_index - kv_pos < 9 and kv_pos <= q_index + 4",
                                  "kv_pos // 32 == q_index // 16", "q_index > 2 or kv_pos < q_first"])
def test_masks_by_rows(family: str, mask: str) -> None:
    """Against the mask in positions with the difference written out; dense and packed, also more queries than keys."""
    written = mask.replace("q_index", "(q_pos - seqlen_kv + seqlen_q)").replace("q_first", "seqlen_kv - seqlen_q")
    for problem in (Problem(1, 70, 150, 2, 1), Problem(1, 90, 33, 1, 1), Problem(3, (40, 0, 70), (90, 7, 33), 2, 1)):
        found = solve(small(family, mask=mask), problem, policies=("random",))
        assert near(found, solve(small(family, mask=written), problem, policies=("random",)).double())


def test_a_call_aligned_top_left() -> None:
    """The call decides where positions begin, the row stays the row."""
    problem, bias = Problem(1, 9, 40, 1, 1), torch.randn(9, 40)
    x = problem.make_inputs()
    variant = small("fa2", "score + b[q_index, kv_pos]", params=BIAS, causal=True)
    for causal, shift in ((True, 31), ("top_left", 0)):
        out = flashgen.attention(x.q, x.k, x.v, causal=causal, spec=variant, params={"b": bias})
        keep = torch.arange(40) <= torch.arange(9)[:, None] + shift
        assert near(out, attended(problem, bias, keep))


def test_the_row_is_a_difference_of_positions() -> None:
    tree = parse("q_index + 1 < kv_pos", {}, "mask")
    assert tree.text == parse("(q_pos - q_first) + 1 < kv_pos", {}, "mask").text
    assert canonical(parse(canonical(tree).text, {}, "mask")).text == canonical(tree).text
    for name in ("q_index", "q_first"):
        with pytest.raises(SpecError, match="means something else"):
            flashgen.variant("score", params={name: {"type": "int"}})
    with pytest.raises(SpecError) as caught:
        flashgen.variant(mask="q_idx < 3")
    assert caught.value.nearest == "q_index"


@pytest.mark.parametrize(("rows", "keys"), LENGTHS)
def test_check_draws_the_tiles(rows: int, keys: int) -> None:
    """`flashgen check` knows the rows: no pair is counted that the mask hides."""
    found: Any = check([small("fa2", mask="kv_pos <= q_index").spec(
        pass_="fwd", dtype="bf16", head_dim_qk=64, kv_layout="dense")], rows, keys)
    assert found.pairs == (sum(min(row + 1, keys) for row in range(rows)), True)
