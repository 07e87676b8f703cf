"""The gradients of attention in fp64, from the formulas; and torch's own, by autograd of plain attention in the inputs'
dtype: the yardstick.

With P the softmax, of each head: dV = P^T dO, dP = dO V^T, dS = P * (dP - delta), dQ = scale * dS K, dK = scale * dS^T Q,
where delta = rowsum(dO * O) - dlse. A row that sees no key has P = 0, so that it gets and gives zeros.
"""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flashgen.runtime.verify.compare import Expected, Truth
from flashgen.runtime.verify.expression_mods import BlockOffset, ExpressionMods
from flashgen.runtime.verify.reference import CHUNK_SCORES, _block_lowprec, _matmul, visible

# Of the products that make dP and delta, whose difference may cancel: what sums in fp32 lose, for vectors of length 1.
FP32_SUMS = 2.0**-22
_PLAIN = ExpressionMods()

# (queries, dout [b, h_kv, group, rows, d], dlse [b, h_kv, group, rows] or None, keys, values [b, h_kv, n, d], mask
# [rows, n], scale) -> dq, dk, dv in the forms of queries, keys and values
_Block = Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor, Tensor]]
Gradients = tuple[Tensor, Tensor, Tensor]


def gradients(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *, dlse: Tensor | None = None, plain: bool = False,
              causal: bool | str = False, window: tuple[int, int] = (-1, -1), softmax_scale: float | None = None,
              cu_seqlens_q: Tensor | None = None, cu_seqlens_kv: Tensor | None = None) -> Gradients:
    """(dq, dk, dv) in fp64, in the shapes of q, k and v, dense or varlen. `plain`: torch's own, in q's dtype.

    Rows that belong to no sequence get zeros, whatever they hold.
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    block, dtype = (_block_plain, q.dtype) if plain else (_block_fp64, torch.float64)
    made = tuple(torch.zeros(t.shape, dtype=torch.float64, device=q.device) for t in (q, k, v))
    if cu_seqlens_q is None or cu_seqlens_kv is None:
        _dense(dout, dlse, (q, k, v), made, causal, window, scale, block, dtype)
    else:
        starts_q, starts_kv = cu_seqlens_q.tolist(), cu_seqlens_kv.tolist()
        for i in range(len(starts_q) - 1):
            rows, keys = slice(*starts_q[i:i + 2]), slice(*starts_kv[i:i + 2])
            parts = [tuple(t[None, at] for t, at in zip(three, (rows, keys, keys), strict=True))
                     for three in ((q, k, v), made)]
            _dense(dout[None, rows], None if dlse is None else dlse[None, :, rows], *parts, causal, window, scale, block,
                   dtype)
    dq, dk, dv = (t.to(dtype) for t in made)
    return dq, dk, dv


def _dense(dout: Tensor, dlse: Tensor | None, inputs: tuple[Tensor, ...], made: tuple[Tensor, ...], causal: bool | str,
           window: tuple[int, int], scale: float, block: _Block, dtype: torch.dtype) -> None:
    """Add to `made`, a sequence and a few query rows at a time, in fp64: torch's own sums keep fp32 in one product, so
    its yardstick must not pay for chunks."""
    q, k, v = inputs
    batch, seqlen_q, num_heads_q, _ = q.shape
    seqlen_kv, num_heads_kv = k.shape[1:3]
    if 0 in (batch, seqlen_q, seqlen_kv, num_heads_q):
        return
    step = min(seqlen_q, max(1, CHUNK_SCORES // (num_heads_q * seqlen_kv)))
    for b in range(batch):
        bs = slice(b, b + 1)
        keys, values = (x[bs].to(dtype).transpose(1, 2) for x in (k, v))
        for r in range(0, seqlen_q, step):
            rs = slice(r, min(r + step, seqlen_q))
            # query head h reads kv head h // group, so a kv head's queries lie side by side
            queries, douts = (x[bs, rs].to(dtype).unflatten(2, (num_heads_kv, -1)).permute(0, 2, 3, 1, 4)
                              for x in (q, dout))
            dlses = None if dlse is None else dlse[bs, :, rs].to(dtype).unflatten(1, (num_heads_kv, -1))
            mask = visible(seqlen_q, seqlen_kv, causal=causal, window=window, first=rs.start, last=rs.stop,
                           device=q.device)
            dq, dk, dv = block(queries, douts, dlses, keys, values, mask, scale)
            made[0][bs, rs] = dq.permute(0, 3, 1, 2, 4).flatten(2, 3).double()
            made[1][bs] += dk.transpose(1, 2).double()
            made[2][bs] += dv.transpose(1, 2).double()


def _block_fp64(queries: Tensor, dout: Tensor, dlse: Tensor | None, keys: Tensor, values: Tensor, mask: Tensor,
                scale: float) -> Gradients:
    scores = (_matmul(queries, keys.mT) * scale).masked_fill(~mask, -torch.inf)
    probs = torch.softmax(scores, -1).masked_fill(~mask, 0.0)  # a row without keys: NaN -> 0
    delta = (dout * _matmul(probs, values)).sum(-1, keepdim=True)
    if dlse is not None:
        delta = delta - dlse[..., None]
    dscores = (probs * (_matmul(dout, values.mT) - delta)).masked_fill(~mask, 0.0)
    return _matmul(dscores, keys) * scale, _summed(dscores, queries) * scale, _summed(probs, dout)


def _summed(weights: Tensor, rows: Tensor) -> Tensor:
    """weights^T @ rows, over the rows of all heads of a group: [b, h_kv, n, d]."""
    return weights.flatten(2, 3).mT @ rows.flatten(2, 3)


def _block_plain(queries: Tensor, dout: Tensor, dlse: Tensor | None, keys: Tensor, values: Tensor, mask: Tensor,
                 scale: float) -> Gradients:
    with torch.enable_grad():
        leaves = tuple(x.detach().requires_grad_() for x in (queries, keys, values))
        queries, keys, values = leaves
        results = _block_lowprec(queries, keys, values, mask, scale, _PLAIN, BlockOffset(*mask.shape))
        count = 1 if dlse is None else 2
        dq, dk, dv = torch.autograd.grad(results[:count], leaves, (dout, dlse)[:count])
    return dq, dk, dv


def expected(exact: Gradients, plain: Gradients, noise: tuple[float, float, float]) -> Truth:
    """What `gradients` gave, as the comparison takes it. `noise`: what sums in fp32 may add to the error of each."""
    axes = ("batch", "row", "head", "column") if exact[0].dim() == 4 else ("token", "head", "column")
    return {name: Expected(right, axes, own, extra)
            for name, right, own, extra in zip(("dq", "dk", "dv"), exact, plain, noise, strict=True)}
