"""Tensors that are not plain memory are refused by name, where no kernel can honour what they stand for."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

import flashgen
from flashgen.errors import UnsupportedError

Q = torch.randn(1, 20, 2, 64).bfloat16()
CU = torch.tensor([0, 20], dtype=torch.int32)
MLA_Q, CACHE, LENGTHS = torch.zeros(1, 1, 4, 576).bfloat16(), torch.zeros(1, 64, 576).bfloat16(), CU[1:]
sloped = flashgen.variant("score - slope[head_q]", params={
    "slope": {"type": "tensor", "dtype": "float32", "shape": ["num_heads_q"]}})
TAKERS: dict[str, tuple[Callable[[Tensor], Any], Tensor]] = {
    "q": (lambda t: flashgen.attention(t, Q, Q), Q), "k": (lambda t: flashgen.attention(Q, t, Q), Q),
    "v": (lambda t: flashgen.attention(Q, Q, t), Q), "out": (lambda t: flashgen.attention(Q, Q, Q, out=t), Q.clone()),
    "params": (lambda t: flashgen.attention(Q, Q, Q, spec=sloped, params={"slope": t}), torch.ones(2)),
    "mla q": (lambda t: flashgen.mla_decode(t, CACHE, LENGTHS), MLA_Q),
    "mla kv_cache": (lambda t: flashgen.mla_decode(MLA_Q, t, LENGTHS), CACHE)}
INTS: dict[str, tuple[Callable[[Tensor], Any], Tensor]] = {
    "cu_seqlens_q": (lambda t: flashgen.attention(Q[0], Q[0], Q[0], cu_seqlens_q=t, cu_seqlens_kv=CU), CU),
    "seqlens_kv": (lambda t: flashgen.mla_decode(MLA_Q, CACHE, t), LENGTHS),
    "schedule": (lambda t: flashgen.mla_schedule(t, 4).rows, LENGTHS)}


@pytest.mark.parametrize("name", TAKERS)
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, in jvp
def test_b126_forward_mode(name: str) -> None:
    call, plain = TAKERS[name]
    with forward_ad.dual_level(), pytest.raises(UnsupportedError, match="dual tensor"):
        call(forward_ad.make_dual(plain, torch.ones_like(plain)))
    with pytest.raises(UnsupportedError, match=r"torch\.func"):
        torch.func.jvp(call, (plain,), (plain,))


@pytest.mark.parametrize("name", TAKERS)
def test_b126_reverse_mode(name: str) -> None:
    call, plain = TAKERS[name]
    if name == "out":
        return  # written in place; torch itself refuses leaves that require grad
    if name in ("q", "k", "v", "params"):
        assert call(plain.detach().clone().requires_grad_()).requires_grad
    else:
        with pytest.raises(UnsupportedError, match="gradient"):
            call(plain.detach().clone().requires_grad_())
    with pytest.raises(UnsupportedError, match="gradient"):
        torch.func.grad(lambda t: call(t).float().sum())(plain)


@pytest.mark.parametrize("name", [*TAKERS, *INTS])
def test_b127_vmap(name: str) -> None:
    call, plain = (TAKERS | INTS)[name]
    with pytest.raises(UnsupportedError, match=r"(?s)vmap.*next: call it outside"):
        torch.vmap(call)(plain[None])


@pytest.mark.parametrize("name", TAKERS)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR")
def test_b127_sparse_and_nested(name: str) -> None:
    call, plain = TAKERS[name]
    with pytest.raises(UnsupportedError, match="sparse"):
        call(plain.to_sparse())
    nested = torch.nested.nested_tensor([plain, plain])
    with pytest.raises(UnsupportedError, match="nested"):
        call(nested)


def test_plain_tensors_beside_a_transform_are_served() -> None:
    """A level or a transform elsewhere is no reason to refuse."""
    expected = flashgen.attention(Q, Q, Q)
    with forward_ad.dual_level():
        assert torch.equal(flashgen.attention(Q, Q, Q), expected)
    ones = torch.ones(3, dtype=torch.bfloat16)
    assert torch.equal(torch.vmap(lambda x: flashgen.attention(Q, Q, Q) * x)(ones)[1], expected)
    assert torch.equal(torch.func.functionalize(lambda q: flashgen.attention(q, q, q))(Q), expected)
    with torch.no_grad():
        assert torch.equal(flashgen.attention(*[Q.clone().requires_grad_()] * 3), expected)


def test_without_query_heads() -> None:
    """Contract 8: zero sizes give empty results."""
    none = Q[:, :, :0]
    for k in (none, Q):
        out, lse = flashgen.attention(none, k, k, return_lse=True)
        assert out.shape == (1, 20, 0, 64) and lse.shape == (1, 0, 20)
    assert flashgen.attention(none[0], none[0], none[0], cu_seqlens_q=CU, cu_seqlens_kv=CU).shape == (20, 0, 64)
    with pytest.raises(UnsupportedError, match="2 query heads over 0 kv heads"):
        flashgen.attention(Q, none, none)
