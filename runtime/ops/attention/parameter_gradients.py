"""Gradients of the tensors among a spec's parameters."""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashgen.errors import UnsupportedError
from flashgen.runtime.ops import front
from flashgen.runtime.ops.attention.parameters import tensors_of
from flashgen.runtime.ops.signature import Tensors


def check_parameters(text: str, extra: Sequence[Tensor], deterministic: bool) -> None:
    """UnsupportedError for a tensor that requires a gradient with the same bits each time, as sums come in any order;
    or in a graph: they are written in place, which the ops' schemas do not say."""
    for (name, has_sums), tensor in zip(tensors_of(text), extra, strict=True):
        if has_sums and tensor.requires_grad and (deterministic or front.listened()):
            raise UnsupportedError(f"a gradient of {name} is asked for "
                                   + ("with a fixed order of sums" if deterministic else "in a call that is traced"),
                                   where=f"params[{name!r}]", allowed="deterministic=False, and no trace",
                                   next=f"{name}.detach()")


def sums_for(text: str, extra: Sequence[Tensor], needed: Sequence[bool]) -> tuple[Tensor, ...]:
    """Zeros for the kernels to add the gradients of float tensors to; without elements where none is needed."""
    return tuple(torch.zeros_like(tensor) if need else tensor.new_empty(0)
                 for (_, has_sums), tensor, need in zip(tensors_of(text), extra, needed, strict=True) if has_sums)


def of_all(text: str, extra: Sequence[Tensor], needed: Sequence[bool], sums: Sequence[Tensor], rows: Tensors
           ) -> list[Tensor | None]:
    """The gradients that are needed of the tensors among the parameters. `rows`: what sink_gradient takes besides."""
    left = iter(sums)
    found: list[Tensor | None] = []
    for (_, has_sums), tensor, need in zip(tensors_of(text), extra, needed, strict=True):
        made = next(left) if has_sums else sink_gradient(tensor, *rows) if need else None
        found.append(made if need else None)
    return found


def sum_names(text: str) -> tuple[str, ...]:
    """What plans call the sums of sums_for."""
    return tuple(f"d_{name}" for name, has_sums in tensors_of(text) if has_sums)


def sink_gradient(sink: Tensor, dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None,
                  cu_seqlens_q: Tensor | None) -> Tensor:
    """Of [num_heads_q]: minus the sum over rows of exp(sink - lse) * delta, where delta = rowsum(dout * out) - dlse."""
    neg_delta = -(dout.float() * out.float()).sum(-1).transpose(-1, -2)  # as lse: heads before rows
    if dlse is not None:
        neg_delta = neg_delta + dlse
    share = torch.exp(sink[:, None] - lse).masked_fill(lse == -torch.inf, 0.0)  # of the sink in each row
    found = share * neg_delta
    if cu_seqlens_q is None:
        return found.sum((0, 2))
    rows = torch.arange(found.shape[-1], device=found.device)
    return found.masked_fill(rows >= cu_seqlens_q[-1], 0.0).sum(-1)
