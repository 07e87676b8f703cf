"""`verify_spec` on the CPU: the reference passes as a kernel, and each planted kernel fault is reported."""
from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit import attention_by_reference as right
from torch import Tensor

import flashgen
from flashgen.codegen.families.registry import lower, targets_of
from flashgen.codegen.spec.spec import Roles, Spec, Tile
from flashgen.codegen.target import TARGETS
from flashgen.errors import EnvironmentError_, UnsupportedError
from flashgen.runtime.ops.attention.edges import edge_problems, length_pairs, tile_shape
from flashgen.runtime.verify import verify
from flashgen.runtime.verify.verify import Result, verify_spec


def spec(**fields: Any) -> Spec:
    """A variant with small tiles, so that its edge problems are small."""
    values: dict[str, Any] = {"name": "t", "family": "fa2", "pass": "fwd", "arch": "sm_90", "dtype": "bf16",
                              "head_dim_qk": 16, "tile": Tile(m=32, n=16), "roles": Roles(mma=2), "stages": 2}
    return Spec(**values | fields)


DENSE, CAUSAL, WINDOW = spec(), spec(causal=True), spec(window=True)
VARLEN = spec(causal=True, kv_layout="varlen", head_dim_v=8)


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashgen, "attention", right, raising=False)
    monkeypatch.setattr(verify, "current_device", lambda: ("cpu", 90))


def failed(results: list[Result]) -> set[str]:
    return {row.check for row in results if not row.ok}


@pytest.mark.parametrize("subject", [DENSE, CAUSAL, WINDOW, VARLEN, spec(kv_layout="varlen", window=True, lse=False)],
                         ids=lambda s: s.variant)
def test_the_reference_passes(subject: Spec) -> None:
    results = verify_spec([subject])
    assert not failed(results), next(row.message for row in results if not row.ok)
    assert {row.check for row in results} >= {"reference", "alone and in company", "strided"}
    assert all(row.variant == subject.variant and "seed=0" in row.problem for row in results)


def _ignores_top_left(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Any:
    return right(q, k, v, **rest | {"causal": bool(rest["causal"])})


def _skips_empty_rows(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Any:
    before = rest["out"].clone()
    out, lse = right(q, k, v, **rest)
    rows = (lse == -torch.inf).movedim(-1, -2)
    out[rows] = before[rows]
    return out, lse


def _forgets_keys_after_five_tiles(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Any:
    if rest["cu_seqlens_kv"] is not None or k.shape[1] <= 80:
        return right(q, k, v, **rest)
    return right(q, torch.cat([k[:, :80], k[:, :k.shape[1] - 80]], 1), v, **rest)


_calls = itertools.count()


def _depends_on_the_run(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Any:
    out, lse = right(q, k, v, **rest)
    return out, lse + 1e-6 * (next(_calls) % 2)  # within the accuracy contract


def _mixes_with_neighbours(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Any:
    out, lse = right(q, k, v, **rest)
    lse += 1e-6 * (q.shape[0] > 1 and q.dim() == 4)
    return out, lse


def _leaks_masked_nan(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Any:
    out, lse = right(q, k, v, **rest)
    if q.dim() == 4 and v.isnan().any():
        out[v.isnan().flatten(1).any(1)] = torch.nan
    return out, lse


def _takes_k_as_contiguous(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Any:
    rows = k.shape[1] * k.shape[2] * k.shape[3]
    plain = k.as_strided(k.shape, (rows, rows // k.shape[1], k.shape[3], 1)) if k.dim() == 4 and k.numel() else k
    return right(q, plain, v, **rest)


def _writes_between_rows_of_out(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Any:
    out = rest["out"]
    if out.stride(1) > out.shape[2] * out.shape[3]:
        out.as_strided(out.shape, out.stride(), out.storage_offset() + out.shape[2] * out.shape[3]).zero_()
    return right(q, k, v, **rest)


def _ignores_out(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Any:
    return right(q, k, v, **rest | {"out": None})


@pytest.mark.parametrize("fault, subject, check", [
    (_ignores_top_left, CAUSAL, "reference"), (_ignores_top_left, WINDOW, "reference"),
    (_ignores_top_left, VARLEN, "reference"), (_skips_empty_rows, CAUSAL, "reference"),
    (_skips_empty_rows, DENSE, "reference"), (_skips_empty_rows, VARLEN, "reference"),
    (_forgets_keys_after_five_tiles, DENSE, "reference"), (_depends_on_the_run, DENSE, "reference"),
    (_mixes_with_neighbours, DENSE, "alone and in company"), (_leaks_masked_nan, CAUSAL, "future keys"),
    (_takes_k_as_contiguous, DENSE, "strided"),
    (_writes_between_rows_of_out, DENSE, "strided"), (_ignores_out, DENSE, "reference"),
])
def test_a_planted_fault_is_reported(monkeypatch: pytest.MonkeyPatch, fault: Callable, subject: Spec,
                                     check: str) -> None:
    monkeypatch.setattr(flashgen, "attention", fault)
    results = verify_spec([subject])
    assert check in failed(results)


def test_out_holds_nan_before_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    before: list[bool] = []

    def watch(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Any:
        before.append(bool(rest["out"].isnan().all()))
        return right(q, k, v, **rest)

    monkeypatch.setattr(flashgen, "attention", watch)
    verify_spec([VARLEN])
    assert before and all(before)


def test_a_failure_names_its_rerun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashgen, "attention", _ignores_top_left)
    row = next(row for row in verify_spec([CAUSAL], seed=3, path="specs/t.yaml") if not row.ok)
    assert f"next: flashgen verify specs/t.yaml --variant {CAUSAL.variant} --seed 3" in row.message
    assert f"{CAUSAL.variant}.sm_90, seed 3, Problem(" in row.message and "causal='top_left'" in row.message


def test_only_variants_of_this_device_and_progress() -> None:
    seen: list[tuple[int, int, str]] = []
    results = verify_spec([DENSE, DENSE.with_(arch="sm_80"), CAUSAL], problems=[],
                          progress=lambda *call: seen.append(call))
    assert results == [] and seen == [(0, 2, DENSE.variant), (1, 2, CAUSAL.variant), (2, 2, "")]
    with pytest.raises(UnsupportedError, match=r"(?s)9\.0.*allowed: sm_80.*nearest: sm_90"):
        verify_spec([DENSE.with_(arch="sm_80")])


def test_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EnvironmentError_, match=r"(?s)no CUDA device.*flashgen doctor"):
        verify_spec([DENSE])


def test_a_plan_that_does_not_fit_is_a_row() -> None:
    (row,) = verify_spec([spec(head_dim_qk=256, tile=Tile(m=256, n=256))])
    assert not row.ok and row.check == "lower" and "allowed" in row.message


@pytest.mark.parametrize("subject", [DENSE, WINDOW, VARLEN], ids=lambda s: s.variant)
def test_edge_problems_cover_the_edges(subject: Spec) -> None:
    plan = lower(subject)
    tile_m, tile_n, stages = tile_shape(plan)
    problems = list(edge_problems(subject, tile_m, tile_n, stages, seed=0))

    def lengths(name: str) -> set[int]:
        values = [getattr(p, name) for p in problems]
        return {n for value in values for n in (value if isinstance(value, tuple) else (value,))}

    for tile, found in ((tile_m, lengths("seqlen_q")), (tile_n, lengths("seqlen_kv"))):
        assert found >= {0, 1, tile - 1, tile, tile + 1} and max(found) > 2 * tile
    assert max(lengths("seqlen_kv")) > 2 * stages * tile_n
    assert {q < kv for q, kv in length_pairs(tile_m, tile_n, stages)} == {True, False}
    assert any(p.num_heads_q // p.num_heads_kv not in (1, p.num_heads_kv) for p in problems)
    tiles = [p.num_heads_q * (sum(-(-n // tile_m) for n in p.seqlen_q) if isinstance(p.seqlen_q, tuple)
                              else p.batch * -(-p.seqlen_q // tile_m)) for p in problems]
    assert max(tiles) > 2 * max(TARGETS[name].device.num_sms for name in targets_of(subject.family))
    assert {p.batch % 2 for p in problems} == {0, 1} and {p.softmax_scale is None for p in problems} == {True, False}
    if subject.window:
        assert {p.window for p in problems} >= {(0, 0), (-1, 3), (2**31 - 1, 2**31 - 1)}
    if subject.kv_layout == "varlen":
        assert any(p.tail for p in problems)
