"""Gradients with `deterministic=True` on a device, over several waves of blocks: the same bits from every call, also
while another stream keeps some of the SMs, and no hang, for which conftest.py has a limit."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flashgen

pytestmark = pytest.mark.gpu
MASKS: dict[str, dict[str, Any]] = {
    "full": {}, "causal": {"causal": True}, "top left": {"causal": "top_left"}, "window": {"window": (700, 30)}}
LENGTHS = ((4000, 3990), (900, 3000), (3000, 900))
REPETITIONS = 8


def inputs(seqlen_q: int, seqlen_kv: int, dims: tuple[int, int], cuda: str, **keywords: Any) -> tuple[Tensor, ...]:
    """dout, q, k, v, out and lse: two query heads to a kv head."""
    q, k, v = (torch.randn(2, rows, heads, columns, device=cuda, dtype=torch.bfloat16) for rows, heads, columns in (
        (seqlen_q, 16, dims[0]), (seqlen_kv, 8, dims[0]), (seqlen_kv, 8, dims[1])))
    out, lse = flashgen.attention(q, k, v, return_lse=True, **keywords)
    return torch.randn_like(out), q, k, v, out, lse


def repeat(x: tuple[Tensor, ...], **keywords: Any) -> None:
    free = flashgen.attention_backward(*x, **keywords, deterministic=False)
    first = flashgen.attention_backward(*x, **keywords, deterministic=True)
    for name, one, other in zip(("dq", "dk", "dv"), first, free, strict=True):
        assert (one - other).norm() <= 1e-2 * other.norm(), f"{name} is another"
    beside, busy = torch.cuda.Stream(), torch.randn(2048, 2048, device=x[0].device)
    for number in range(REPETITIONS):
        if number % 2:
            with torch.cuda.stream(beside):
                torch.mm(busy, busy)
        again = flashgen.attention_backward(*x, **keywords, deterministic=True)
        assert all(map(torch.equal, first, again)), f"other bits in repetition {number}"


@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_same_bits(mask: str, dims: tuple[int, int], cuda: str) -> None:
    for lengths in LENGTHS:
        repeat(inputs(*lengths, dims, cuda, **MASKS[mask]), **MASKS[mask])


@pytest.mark.parametrize("mask", MASKS)
def test_same_bits_of_packed_sequences(mask: str, cuda: str) -> None:
    """Of which none hangs on the others."""
    lengths = torch.tensor([(1500, 1500), (0, 40), (700, 2000), (1, 1), (129, 0), (2000, 700)])
    starts = [torch.cat((torch.zeros(1, dtype=torch.int64), side.cumsum(0))).int().to(cuda) for side in lengths.T]
    total_q, total_kv = lengths.sum(0).tolist()
    keywords = {**MASKS[mask], "cu_seqlens_q": starts[0], "cu_seqlens_kv": starts[1]}
    q, k, v = (torch.randn(rows, heads, 128, device=cuda, dtype=torch.bfloat16)
               for rows, heads in ((total_q, 16), (total_kv, 8), (total_kv, 8)))
    out, lse = flashgen.attention(q, k, v, return_lse=True, **keywords)
    x = torch.randn_like(out), q, k, v, out, lse
    repeat(x, **keywords)
    dq = flashgen.attention_backward(*x, **keywords, deterministic=True)[0]
    for begin, end, begin_kv, end_kv in zip(*(t.tolist() for s in starts for t in (s[:-1], s[1:])), strict=True):
        if end - begin > 1 and end_kv > begin_kv:  # no window hides any from 1 token: another kernel
            rows = [t[begin:end] for t in (x[0], q)] + [t[begin_kv:end_kv] for t in (k, v)] + [out[begin:end]]
            alone = flashgen.attention_backward(*(t[None] for t in rows), lse[None, :, begin:end].contiguous(),
                                                **MASKS[mask], deterministic=True)[0]
            assert torch.equal(alone[0], dq[begin:end]), f"rows {begin} to {end} depend on others"


@pytest.mark.parametrize("mask", MASKS)
def test_same_bits_of_fa2(mask: str, cuda: str) -> None:
    repeat(inputs(2000, 1990, (128, 128), cuda, **MASKS[mask]), **MASKS[mask], spec="fa2_bwd_deterministic")
