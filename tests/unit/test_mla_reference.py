"""The reference for decodes, proven: against sums written out, and that what the contract hides stays hidden."""
from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from mla_kit import mla_by_reference, truth_of

from flashgen.errors import VerifyError
from flashgen.runtime.ops.mla_decode.problem import GARBAGE_IDS, MlaInputs, MlaProblem
from flashgen.runtime.verify.compare import check, named

PROBLEMS = [
    MlaProblem((5, 0, 130, 1), 3, 2, 64, causal=True), MlaProblem((70, 3), 2, 1, 16, sink=True, dtype="fp16"),
    MlaProblem((9, 33), 2, 3, None, 512, causal=True, sink=True, softmax_scale=0.3), MlaProblem((7, 0), 1, 1, 1),
    MlaProblem((2, 1, 0), 2, 4, 61, causal=True, sink=True)]


def written_out(x: MlaInputs, i: int, row: int, head: int) -> tuple[torch.Tensor, float]:
    """(out, lse) of one row, key by key."""
    length, scale = int(x.seqlens_kv[i]), x.softmax_scale or x.q.shape[-1] ** -0.5
    seen = length - x.q.shape[1] + 1 + row if x.causal else length
    query, scores, values = x.q[i, row, head].double(), [], []
    for j in range(max(0, seen)):
        if x.page_table is None:
            key = x.kv_cache[i, j]
        else:
            size = x.kv_cache.shape[1]
            key = x.kv_cache[int(x.page_table[i, j // size]), j % size]
        scores.append(float(query @ key.double()) * scale)
        values.append(key[:512].double())
    joined = scores + ([] if x.sink is None else [float(x.sink[head])])
    total = math.fsum(map(math.exp, joined))
    out = sum((math.exp(s) / total * v for s, v in zip(scores, values, strict=True)), torch.zeros(512).double())
    return out, math.log(total) if joined else -math.inf


@pytest.mark.parametrize("problem", PROBLEMS, ids=repr)
def test_every_row_is_the_sum_written_out(problem: MlaProblem) -> None:
    x = problem.make_inputs()
    out, lse, plain = truth_of(x)
    for i in range(len(problem.lengths)):
        for row in range(problem.seqlen_q):
            for head in range(problem.num_heads_q):
                expected, expected_lse = written_out(x, i, row, head)
                torch.testing.assert_close(out[i, row, head], expected, atol=1e-12, rtol=1e-10)
                assert float(lse[i, head, row]) == pytest.approx(expected_lse, abs=1e-12)
    assert plain.dtype == x.q.dtype and torch.isfinite(plain).all()
    torch.testing.assert_close(plain.double(), out, atol=0.05, rtol=0.1)


@pytest.mark.parametrize("problem", PROBLEMS, ids=repr)
def test_inputs_are_hostile_where_nothing_counts(problem: MlaProblem) -> None:
    x = problem.make_inputs()
    assert x.kv_cache.isnan().any() and torch.equal(x.q, problem.make_inputs().q)
    assert all(x.keys(i).isfinite().all() and len(x.keys(i)) == n for i, n in enumerate(problem.lengths))
    if x.page_table is not None:
        used = [-(-n // x.kv_cache.shape[1]) for n in problem.lengths]
        ids = [int(page) for row, count in zip(x.page_table, used, strict=True) for page in row[:count]]
        assert len({*ids}) == len(ids) and all(0 <= page < x.kv_cache.shape[0] for page in ids)
        assert all(page in GARBAGE_IDS for row, count in zip(x.page_table.tolist(), used, strict=True)
                   for page in row[count:])
        assert x.page_table.shape[1] > max(used)


def test_a_sink_takes_its_share_and_no_more() -> None:
    x = replace(PROBLEMS[0], causal=False).make_inputs()
    plain, lse, _ = truth_of(x)
    for sink, share in ((-math.inf, 1.0), (math.inf, 0.0)):
        out, found, _ = truth_of(x.with_(sink=torch.full((3,), sink)))
        torch.testing.assert_close(out, plain * share)
        assert torch.equal(found, lse if sink < 0 else torch.full_like(lse, math.inf))
    out, found, _ = truth_of(x.with_(sink=lse[0, :, 0].float()))
    torch.testing.assert_close(out[0, 0], plain[0, 0] / 2, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found[1], lse[0, :, :1].float().double().expand(3, 2))


def request(x: MlaInputs, i: int) -> MlaInputs:
    """Request i as a call of its own, over the same cache."""
    part, paged = slice(i, i + 1), x.page_table is not None
    return x.with_(q=x.q[part], seqlens_kv=x.seqlens_kv[part], kv_cache=x.kv_cache if paged else x.kv_cache[part],
                   page_table=x.page_table[part] if x.page_table is not None else None)


def test_a_request_alone_is_the_request_in_company() -> None:
    for problem in PROBLEMS:
        x = problem.make_inputs()
        out, lse, _ = truth_of(x)
        for i in range(len(problem.lengths)):
            alone, alone_lse, _ = truth_of(request(x, i))
            assert torch.equal(alone[0], out[i]) and torch.equal(alone_lse[0], lse[i])


def test_wrong_results_are_refused() -> None:
    problem = PROBLEMS[1]
    x = problem.make_inputs()
    out, lse = mla_by_reference(x.q, x.kv_cache, x.seqlens_kv, **x.keywords, return_lse=True)
    found = check(named(out, lse), x)
    assert 0 < found.out_error <= found.out_allowed and found.lse_error < 1e-6
    for wrong_out, wrong_lse, words in ((out + 0.1, lse, "out at"), (out, lse / math.log(2), "lse at"),
                                        (out.where(out != out[1, 0, 1, 7], math.nan), lse, "NaN in 1 wrong places")):
        with pytest.raises(VerifyError, match=words):
            check(named(wrong_out, wrong_lse), x, label="here")
