"""flashgen.compat.flash_mla: the original's signatures, metadata, lse and refusals, over the reference."""
from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from mla_kit import mla_by_reference, truth_of

from flashgen.compat import flash_mla
from flashgen.compat.flash_mla import FlashMLASchedMeta, MetadataError, flash_mla_with_kvcache, get_mla_metadata
from flashgen.errors import UnsupportedError
from flashgen.runtime.ops.mla_decode.problem import MlaInputs, MlaProblem
from flashgen.runtime.ops.mla_decode.signature import MlaSchedule

PROBLEM = MlaProblem((70, 0, 5, 1), 4, 2, 64, causal=True)


@pytest.fixture(autouse=True)
def schedules(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Sizes of the schedules that were made."""
    made: list[tuple[int, ...]] = []

    def schedule(seqlens: torch.Tensor, num_heads_q: int, seqlen_q: int) -> MlaSchedule:
        made.append((seqlens.shape[0], num_heads_q, seqlen_q))
        return MlaSchedule(torch.zeros(4, 8, dtype=torch.int32), *made[-1])

    monkeypatch.setattr(flash_mla, "mla_decode", mla_by_reference)
    monkeypatch.setattr(flash_mla, "mla_schedule", schedule)
    return made


def call(x: MlaInputs, meta: Any, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    arguments = {"q": x.q, "k_cache": x.kv_cache[:, :, None], "block_table": x.page_table,
                 "cache_seqlens": x.seqlens_kv, "head_dim_v": 512, "tile_scheduler_metadata": meta, "causal": x.causal}
    return flash_mla_with_kvcache(**{**arguments, **more})


def test_signatures_are_the_originals() -> None:
    names = ("q k_cache block_table cache_seqlens head_dim_v tile_scheduler_metadata num_splits softmax_scale causal "
             "is_fp8_kvcache indices attn_sink extra_k_cache extra_indices_in_kvcache topk_length extra_topk_length")
    parameters = inspect.signature(flash_mla_with_kvcache).parameters
    assert " ".join(parameters) == names
    assert all(p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for p in parameters.values())
    defaults = {name: p.default for name, p in parameters.items() if p.default is not inspect.Parameter.empty}
    assert [*defaults] == names.split()[6:]
    assert {name for name, value in defaults.items() if value is not None} == {"causal", "is_fp8_kvcache"}
    lengths = torch.zeros(3, dtype=torch.int32)
    for arguments, named in (((), {}), ((lengths, 256, 1), {}), ((lengths, 256, 1, 128, False, None), {}),
                             ((), {"cache_seqlens": lengths, "num_q_tokens_per_head_k": 4, "num_heads_k": 1})):
        meta, splits = get_mla_metadata(*arguments, **named)
        assert isinstance(meta, FlashMLASchedMeta) and splits is None and not meta.have_initialized


def test_metadata_is_filled_once(schedules: list[tuple[int, ...]]) -> None:
    x, (meta, splits) = PROBLEM.make_inputs(), get_mla_metadata()
    first = call(x, meta, num_splits=splits)
    assert meta.have_initialized and meta.config == FlashMLASchedMeta.Config(4, 2, 4, 64, 1, True, False, None, None,
                                                                             None)
    assert isinstance(meta.tile_scheduler_metadata, torch.Tensor) and schedules == [(4, 4, 2)]
    again = call(x, meta)
    assert schedules == [(4, 4, 2)] and all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_shapes_and_the_lse_of_nothing() -> None:
    x = PROBLEM.make_inputs()
    out, lse = call(x, get_mla_metadata()[0])
    exact, expected, _ = truth_of(x)
    assert out.shape == (4, 2, 4, 512) and lse.shape == (4, 4, 2) and lse.dtype == torch.float32
    nothing = expected == -math.inf
    assert nothing[1].all() and nothing[3, :, 0].all() and not nothing[3, :, 1].any()
    assert torch.equal(torch.isposinf(lse), nothing) and not out[1].any()
    torch.testing.assert_close(lse[~nothing], expected[~nothing].float())
    torch.testing.assert_close(out, exact.to(out.dtype))


def test_a_sink_scales_out_and_leaves_lse() -> None:
    x, meta = PROBLEM.make_inputs(), get_mla_metadata()[0]
    out, lse = call(x, meta)
    for value in (0.3, math.inf, -math.inf):
        sink = torch.full((4,), value)
        scaled, same = call(x, meta, attn_sink=sink)
        assert torch.equal(same, lse)
        share = torch.sigmoid(lse - sink[:, None]).transpose(1, 2)[..., None].where(~torch.isposinf(
            lse).transpose(1, 2)[..., None], torch.zeros(()))
        torch.testing.assert_close(scaled.float(), out.float() * share, atol=2e-3, rtol=2e-2)


@pytest.mark.parametrize(("more", "where", "kind"), [
    ({"tile_scheduler_metadata": torch.zeros(3, 8)}, "tile_scheduler_metadata", MetadataError),
    ({"num_splits": torch.zeros(4)}, "num_splits", MetadataError),
    ({"block_table": None}, "block_table", MetadataError), ({"cache_seqlens": None}, "cache_seqlens", MetadataError),
    ({"is_fp8_kvcache": True}, "is_fp8_kvcache", UnsupportedError),
    *(({name: torch.zeros(4)}, name, UnsupportedError)
      for name in ("indices", "extra_k_cache", "extra_indices_in_kvcache", "topk_length", "extra_topk_length")),
    ({"k_cache": torch.zeros(3, 64, 576)}, "q, k_cache", UnsupportedError),
])
def test_refusals(more: dict[str, Any], where: str, kind: type) -> None:
    meta = get_mla_metadata()[0]
    with pytest.raises(kind) as caught:
        call(PROBLEM.make_inputs(), meta, **more)
    assert caught.value.where == where and caught.value.allowed and not meta.have_initialized
    assert issubclass(MetadataError, AssertionError) and issubclass(MetadataError, ValueError)


@pytest.mark.parametrize(("problem", "what"), [
    (MlaProblem((70, 0, 5), 4, 2, 64, causal=True), "b is 3, and was 4"),
    (MlaProblem((70, 0, 5, 1), 4, 1, 64, causal=True), "s_q is 1, and was 2"),
    (MlaProblem((70, 0, 5, 1), 8, 2, 64, causal=True), "h_q is 8"),
    (MlaProblem((70, 0, 5, 1), 4, 2, 128, causal=True), "page_block_size is 128"),
    (MlaProblem((70, 0, 5, 1), 4, 2, 64), "causal is False"),
])
def test_later_calls_must_fit(problem: MlaProblem, what: str) -> None:
    meta = get_mla_metadata()[0]
    call(PROBLEM.make_inputs(), meta)
    with pytest.raises(MetadataError, match=what):
        call(problem.make_inputs(), meta)
