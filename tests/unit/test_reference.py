"""The fp64 reference against independent formulations, the hand cases of public bugs, and the online softmax."""
from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import problems
from torch import Tensor

from flashgen.runtime.ops.attention.problem import Inputs, Problem
from flashgen.runtime.verify import reference as module
from flashgen.runtime.verify.reference import lowprec, reference

INF, NAN = math.inf, math.nan
EXAMPLES = settings(deadline=None, derandomize=True, max_examples=60)


def answer(inputs: Inputs) -> tuple[Tensor, Tensor]:
    return reference(inputs.q, inputs.k, inputs.v, **inputs.keywords)


def sees(i: int, j: int, seqlen_q: int, seqlen_kv: int, causal: bool | str, window: tuple[int, int]) -> bool:
    """The mask in words: contracts.md, values 4 and 5."""
    diagonal = i if causal == "top_left" else i + seqlen_kv - seqlen_q
    if causal and j > diagonal:
        return False
    too_far_left = window[0] != -1 and diagonal - j > window[0]
    too_far_right = window[1] != -1 and j - diagonal > window[1]
    return not too_far_left and not too_far_right


def by_sdpa(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, which rows see a key) of one sequence [rows, heads, columns] from torch's own fp64 attention."""
    mask = torch.tensor([[sees(i, j, len(q), len(k), problem.causal, problem.window) for j in range(len(k))]
                         for i in range(len(q))], dtype=torch.bool).reshape(len(q), len(k))
    ratio = problem.num_heads_q // problem.num_heads_kv
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = (torch.stack([x[h // ratio] for h in range(problem.num_heads_q)]) for x in (k, v))
    scale = problem.head_dim_qk ** -0.5 if problem.softmax_scale is None else problem.softmax_scale
    out = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], mask, scale=scale)[0]
    scores = torch.einsum("hid,hjd->hij", q, k) * scale
    return out.transpose(0, 1), scores.where(mask, -INF).logsumexp(-1), mask.any(-1)


@EXAMPLES
@given(problems())
def test_equals_sdpa_in_fp64(problem: Problem) -> None:
    inputs = problem.make_inputs()
    out, lse = answer(inputs)
    if problem.varlen:
        assert inputs.cu_seqlens_q is not None and inputs.cu_seqlens_kv is not None
        cu_q, cu_kv = inputs.cu_seqlens_q.tolist(), inputs.cu_seqlens_kv.tolist()
        parts = [(out[a:b], lse[:, a:b], inputs.q[a:b], inputs.k[c:d], inputs.v[c:d])
                 for a, b, c, d in zip(cu_q, cu_q[1:], cu_kv, cu_kv[1:], strict=False)]
        assert not out[cu_q[-1]:].any() and (lse[:, cu_q[-1]:] == -INF).all()
    else:
        parts = [(out[i], lse[i], inputs.q[i], inputs.k[i], inputs.v[i]) for i in range(problem.batch)]
    for mine, mine_lse, q, k, v in parts:
        theirs, theirs_lse, live = by_sdpa(q, k, v, problem)
        torch.testing.assert_close(mine[live], theirs[live], rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(mine_lse[:, live], theirs_lse[:, live], rtol=1e-11, atol=1e-11)
        assert not mine[~live].any() and (mine_lse[:, ~live] == -INF).all()


@EXAMPLES
@given(problems(), st.integers(1, 200))
def test_chunks_change_nothing(problem: Problem, chunk: int) -> None:
    inputs = problem.make_inputs()
    with pytest.MonkeyPatch.context() as patch:
        whole = answer(inputs)
        patch.setattr(module, "CHUNK_SCORES", chunk)
        torch.testing.assert_close(answer(inputs), whole, rtol=1e-12, atol=1e-12)


@EXAMPLES
@given(problems())
def test_plain_attention_of_the_inputs_dtype_is_near(problem: Problem) -> None:
    inputs = problem.make_inputs()
    out, _ = answer(inputs)
    plain = lowprec(inputs.q, inputs.k, inputs.v, **inputs.keywords)
    assert plain.dtype == inputs.q.dtype and plain.shape == out.shape
    torch.testing.assert_close(plain.double(), out, rtol=0, atol=0.5)


def ones(seqlen_q: int, seqlen_kv: int, head_dim: int = 8, dtype: torch.dtype = torch.bfloat16) -> Inputs:
    """q = k = 0: every visible key weighs the same. v[j] = 2 ** j, so that the sum names the keys."""
    q, k = (torch.zeros(1, n, 1, head_dim, dtype=dtype) for n in (seqlen_q, seqlen_kv))
    v = (2.0 ** torch.arange(seqlen_kv)).to(dtype).reshape(1, -1, 1, 1).expand(1, seqlen_kv, 1, head_dim)
    return Inputs(q, k, v)


def keys_seen(inputs: Inputs) -> list[list[int]]:
    """Which keys each row saw, read back from the output and lse of `ones`."""
    out, lse = answer(inputs)
    count = lse[0, 0].exp().round()
    total = (out[0, :, 0, 0] * count).round().long()
    return [[j for j in range(inputs.k.shape[1]) if int(t) >> j & 1] for t in total]


def test_b001_rows_without_a_key() -> None:
    for inputs, empty in (
        (ones(4, 2).with_(causal=True), [0, 1]),
        (ones(8, 4).with_(causal="top_left", window=(0, -1)), [4, 5, 6, 7]),
        (ones(4, 1).with_(window=(0, 0)), [0, 1, 2]),
    ):
        out, lse = answer(inputs)
        assert [i for i, seen in enumerate(keys_seen(inputs)) if not seen] == empty
        assert not out[0, empty].any() and (lse[0, 0, empty] == -INF).all()
        assert not out.isnan().any() and not lse.isnan().any()


def test_b003_very_low_scores_still_average() -> None:
    q, k = torch.full((1, 1, 1, 128), 40.0), torch.full((1, 16, 1, 128), -48.0)
    v = torch.randn(1, 16, 1, 128)
    out, lse = reference(q, k, v)
    torch.testing.assert_close(out[0, 0], v.double().mean(1)[0])
    assert lse.item() == pytest.approx(128**-0.5 * -245760 + math.log(16), rel=1e-14)


def test_b004_a_masked_key_gains_no_weight() -> None:
    q, v = torch.ones(1, 2, 1, 8), torch.tensor([1.0, 100.0]).reshape(1, 2, 1, 1).expand(1, 2, 1, 8)
    k = torch.tensor([-2500.0, 3.0]).reshape(1, 2, 1, 1).expand(1, 2, 1, 8)
    out, lse = reference(q, k, v, causal=True, softmax_scale=1.0)
    assert (out[0, 0] == 1).all() and lse[0, 0, 0].item() == -20000


def test_b007_causal_is_bottom_right() -> None:
    assert keys_seen(ones(5, 2).with_(causal=True)) == [[], [], [], [0], [0, 1]]
    assert keys_seen(ones(2, 5).with_(causal=True)) == [[0, 1, 2, 3], [0, 1, 2, 3, 4]]


def test_b008_top_left() -> None:
    assert keys_seen(ones(1, 16).with_(causal="top_left")) == [[0]]
    assert keys_seen(ones(2, 4).with_(causal="top_left")) == [[0], [0, 1]]


@pytest.mark.parametrize("right", [3, 5, 7, 100, 2**31 - 1])
def test_b010_right_window(right: int) -> None:
    assert keys_seen(ones(8, 3).with_(window=(-1, right))) == [
        [j for j in range(3) if j <= i - 5 + right] for i in range(8)]


def test_b012_four_keys_with_itself() -> None:
    assert keys_seen(ones(8, 8).with_(causal=True, window=(3, -1)))[7] == [4, 5, 6, 7]


def test_b015_sequences_of_no_and_one_row() -> None:
    problem = Problem(3, (1, 0, 1), (3, 0, 5), 9, 3, causal=True)
    inputs = problem.make_inputs()
    out, lse = answer(inputs)
    for row, keys in ((0, slice(0, 3)), (1, slice(3, 8))):
        alone, alone_lse = reference(inputs.q[None, row:row + 1], inputs.k[None, keys], inputs.v[None, keys])
        torch.testing.assert_close(out[row], alone[0, 0])
        torch.testing.assert_close(lse[:, row], alone_lse[0, :, 0])


def test_b017_rows_of_no_sequence() -> None:
    out, lse = answer(Problem(2, (4, 4), (4, 4), tail=2).make_inputs())
    assert not out[8:].any() and (lse[:, 8:] == -INF).all() and out[:8].isfinite().all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("batch, seqlen_q, seqlen_kv", [(0, 64, 64), (2, 0, 4096), (2, 64, 0), (0, (), ())])
def test_b018_zero_sizes(batch: int, seqlen_q: int | tuple, seqlen_kv: int | tuple, causal: bool) -> None:
    out, lse = answer(Problem(batch, seqlen_q, seqlen_kv, causal=causal).make_inputs())
    assert not out.any() and (lse == -INF).all() and out.numel() == lse.numel() * 64


def test_a_problem_repeats_itself_and_poisons_its_tail() -> None:
    problem = Problem(2, (4, 0), (3, 5), 6, 2, 16, 8, tail=2, seed=7, dtype="fp16")
    first, second = problem.make_inputs(), eval(repr(problem)).make_inputs()
    for name, rows, shape in (("q", 4, (6, 16)), ("k", 8, (2, 16)), ("v", 8, (2, 8))):
        x = getattr(first, name)
        assert x.shape == (rows + 2, *shape) and x.dtype == torch.float16
        assert x[:rows].isfinite().all() and x[rows:].isnan().all()
        torch.testing.assert_close(x, getattr(second, name), rtol=0, atol=0, equal_nan=True)
    for wrong in (dict(seqlen_kv=(3,)), dict(seqlen_q=4), dict(seqlen_q=4, seqlen_kv=4)):
        with pytest.raises(ValueError, match=r"lengths are|only a varlen problem"):
            replace(problem, **wrong)  # type: ignore[arg-type]


def test_nan_and_inf_reach_exactly_the_rows_that_see_them() -> None:
    inputs = Problem(1, 6, 6, 2, 1, 8, 8, causal=True).make_inputs()
    clean, clean_lse = answer(inputs)
    for value, at in ((NAN, 3), (INF, 4), (-INF, 2)):
        v = inputs.v.clone()
        v[0, at, 0, 5] = value
        out, lse = answer(inputs.with_(v=v))
        torch.testing.assert_close(lse, clean_lse, rtol=0, atol=0)
        hit = torch.zeros_like(out, dtype=torch.bool)
        hit[0, at:, :, 5] = True
        torch.testing.assert_close(out[~hit], clean[~hit], rtol=0, atol=0)
        torch.testing.assert_close(out[hit], torch.full_like(out[hit], value), equal_nan=True)
    k = inputs.k.clone()
    k[0, 3] = NAN
    out, lse = answer(inputs.with_(k=k))
    assert out[0, 3:].isnan().all() and lse[0, :, 3:].isnan().all()
    torch.testing.assert_close(out[0, :3], clean[0, :3], rtol=0, atol=0)
    v = inputs.v.clone()
    v[0, 1, 0, 0], v[0, 2, 0, 0] = INF, -INF
    column = answer(inputs.with_(v=v))[0][0, :, 0, 0]
    assert column[1] == INF and column[2:].isnan().all()


# The online softmax, in log2 units. State: (m, l, acc) with sum over seen keys of 2 ** s = l * 2 ** m.
def fold(scores: Tensor, values: Tensor, blocks: list[list[int]], raise_by: float) -> tuple[float, float, Tensor]:
    """Blocks one after another; the maximum is raised only where it grows by more than `raise_by`."""
    m, total, acc = -INF, 0.0, torch.zeros(values.shape[1], dtype=torch.float64)
    for block in blocks:
        new = max(m, scores[block].max().item())
        if new == -INF:
            continue
        if m == -INF or new > m + raise_by:
            shrink = 0.0 if m == -INF else 2.0 ** (m - new)
            m, total, acc = new, total * shrink, acc * shrink
        weights = torch.exp2(scores[block] - m)
        total, acc = total + weights.sum().item(), acc + weights @ values[block]
    return m, total, acc


@st.composite
def split_rows(draw: st.DrawFn) -> tuple[list[float], list[list[int]]]:
    score = st.floats(-300, 300) | st.just(-INF) | st.sampled_from([0.0, 8.0, 8.5, -1e4, 1e4])
    row = draw(st.lists(score, min_size=1, max_size=40))
    order = draw(st.permutations(range(len(row))) | st.just(list(range(len(row)))))
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(row) - 1)))) | {0, len(row)})
    return row, [list(order[a:b]) for a, b in pairwise(cuts)]


@settings(deadline=None, derandomize=True, max_examples=300)
@given(split_rows(), st.sampled_from([0.0, 8.0]))
def test_online_softmax_of_any_split(case: tuple[list[float], list[list[int]]], raise_by: float) -> None:
    row, blocks = case
    scores = torch.tensor(row, dtype=torch.float64)
    values = torch.randn(len(row), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(len(row)))
    m, total, acc = fold(scores, values, blocks, raise_by)
    top = scores.max().item()
    if top == -INF:
        assert (m, total) == (-INF, 0.0) and not acc.any()
        return
    assert m == top if raise_by == 0 else m <= top <= m + raise_by
    weights = torch.exp2(scores - top)
    assert total * 2.0 ** (m - top) == pytest.approx(weights.sum().item(), rel=1e-13)
    torch.testing.assert_close(acc / total, weights @ values / weights.sum(), rtol=1e-12, atol=1e-12)
