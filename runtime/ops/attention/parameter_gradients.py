"""Gradients of the tensors among a spec's parameters."""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashgen.codegen.spec.expressions import SINK
from flashgen.errors import UnsupportedError
from flashgen.runtime.ops.attention.parameters import tensors_of


def check_parameters(text: str, extra: Sequence[Tensor]) -> None:
    """UnsupportedError for a tensor that requires a gradient which nothing makes."""
    for param, tensor in zip(tensors_of(text), extra, strict=True):
        if tensor.requires_grad and param != SINK:
            raise UnsupportedError(f"a gradient of {param.name} is asked for, which no backward kernel makes",
                                   where=f"params[{param.name!r}]", allowed="a gradient of the sink alone",
                                   next=f"{param.name}.detach()")


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
