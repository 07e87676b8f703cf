"""Tensors that are of type torch.Tensor and yet not plain: each kind that flashgen refuses, and what to do instead."""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from flashgen.errors import UnsupportedError

# What torch.autograd.grad(..., is_grads_batched=True) makes.
_is_legacy_batched: Callable[[Tensor], bool] = getattr(
    torch._C._functorch, "is_legacy_batchedtensor", lambda t: False)
_KINDS: tuple[tuple[Callable[[Tensor], bool], str, str], ...] = (
    (lambda t: torch._C._functorch.is_batchedtensor(t) or _is_legacy_batched(t),
     "batched by torch.vmap, and flashgen has no rule for that",
     "call it outside of vmap: its own batch dimension, or cu_seqlens, takes many problems at once"),
    (torch._C._functorch.is_gradtrackingtensor, "in a transform of torch.func, and flashgen has no gradient for that",
     "call it outside of the transform; torch.autograd follows flashgen.attention"),
    (lambda t: t.is_nested, "a nested tensor", "give values() with cu_seqlens_q and cu_seqlens_kv"),
    (lambda t: t.layout is not torch.strided, "a sparse tensor", "to_dense()"),
    (lambda t: unpack_dual(t).tangent is not None, "a dual tensor of forward-mode AD, and flashgen has no derivative",
     "give torch.autograd.forward_ad.unpack_dual(...).primal"))


def refuse_wrapped(**tensors: Tensor | None) -> None:
    """UnsupportedError, by name, for the first that is not plain. Not on the path of a call that succeeds."""
    for name, t in tensors.items():
        for is_so, what, advice in _KINDS:
            if isinstance(t, Tensor) and is_so(t):
                raise UnsupportedError(f"{name} is {what}", where=name, allowed="plain tensors", next=advice)
