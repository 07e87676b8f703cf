"""The gradients of attention in fp64, from the formulas; and torch's own, by autograd of plain attention in the inputs'
dtype: the yardstick, with what no backward that reads `out` in its dtype can avoid.

With P the softmax, of each head: dV = P^T dO, dP = dO V^T, dS = P * (dP - delta), dQ = scale * dS K and
dK = scale * dS^T Q, where delta = rowsum(dO * O) - dlse. A row that sees no key has P = 0: it gets and gives zeros.
Where an expression changes scores, dS is times its derivative, which torch finds.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashgen.runtime.verify.compare import Expected, Truth
from flashgen.runtime.verify.expression_mods import BlockOffset, ExpressionMods
from flashgen.runtime.verify.reference import CHUNK_SCORES, _block_lowprec, _matmul, _sinks, visible

# Of the products that make dP and delta, whose difference may cancel: what sums in fp32 lose, for vectors of length 1.
FP32_SUMS = 2.0**-22

# (queries, dout [b, h_kv, group, rows, d], dlse [b, h_kv, group, rows] or None, keys, values [b, h_kv, n, d], mask
# [rows, n], scale, mods, where the block is) -> dq, dk, dv in the forms of queries, keys and values
_Block = Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor, float, ExpressionMods, BlockOffset],
                  tuple[Tensor, Tensor, Tensor]]
Gradients = tuple[Tensor, Tensor, Tensor]


def gradients(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *, dlse: Tensor | None = None, kind: str = "exact",
              causal: bool | str = False, window: tuple[int, int] = (-1, -1), softmax_scale: float | None = None,
              cu_seqlens_q: Tensor | None = None, cu_seqlens_kv: Tensor | None = None,
              mods: ExpressionMods | None = None) -> Gradients:
    """(dq, dk, dv) in fp64, in the shapes of q, k and v, dense or varlen. `kind`: "exact"; "plain", torch's own in q's
    dtype; "rounded", the exact ones but for delta, made of an `out` in q's dtype; or "sizes", what the exact ones are
    sums of, without signs.

    Rows that belong to no sequence get zeros, whatever they hold. `mods`: what a spec's expressions do.
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    block: _Block = partial(_block_exact, out_dtype=q.dtype) if kind == "rounded" else _BLOCKS[kind]
    dtype = q.dtype if kind == "plain" else torch.float64
    made = tuple(torch.zeros(t.shape, dtype=torch.float64, device=q.device) for t in (q, k, v))
    starts: tuple[list[int], list[int]] | None = None
    if cu_seqlens_q is not None and cu_seqlens_kv is not None:
        starts = cu_seqlens_q.tolist(), cu_seqlens_kv.tolist()
    for i in range(q.shape[0] if starts is None else len(starts[0]) - 1):
        rows, keys = (i, i) if starts is None else (slice(*side[i:i + 2]) for side in starts)
        dlse_part = None if dlse is None else dlse[i] if starts is None else dlse[:, rows]
        begin = (0, 0) if starts is None else (starts[0][i], starts[1][i])
        at = BlockOffset(0, 0, i, 0, *begin, causal == "top_left")
        _sequence(dout[rows], q[rows], k[keys], v[keys], dlse_part, [made[0][rows], made[1][keys], made[2][keys]],
                  block, dtype, scale, {"causal": causal, "window": window, "device": q.device},
                  mods or ExpressionMods(), at)
    dq, dk, dv = (t.to(dtype) for t in made)
    return dq, dk, dv


def _sequence(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, dlse: Tensor | None, made: list[Tensor], block: _Block,
              dtype: torch.dtype, scale: float, mask: dict[str, Any], mods: ExpressionMods, at: BlockOffset) -> None:
    """Add one sequence to `made`, a few query rows at a time and in fp64: torch's own sums keep fp32 in one product, so
    its yardstick must not pay for chunks."""
    (seqlen_q, num_heads_q, _), (seqlen_kv, num_heads_kv, _) = q.shape, k.shape
    if 0 in (seqlen_q, seqlen_kv, num_heads_q):
        return
    step = min(seqlen_q, max(1, CHUNK_SCORES // (num_heads_q * seqlen_kv)))
    keys, values = (x[None].to(dtype).transpose(1, 2) for x in (k, v))
    for first in range(0, seqlen_q, step):
        rows = slice(first, min(first + step, seqlen_q))
        # query head h reads kv head h // group, so a kv head's queries lie side by side
        queries, douts = (x[None, rows].to(dtype).unflatten(2, (num_heads_kv, -1)).permute(0, 2, 3, 1, 4)
                          for x in (q, dout))
        dlses = None if dlse is None else dlse[None, :, rows].to(dtype).unflatten(1, (num_heads_kv, -1))
        seen = visible(seqlen_q, seqlen_kv, first=rows.start, last=rows.stop, **mask)
        here = replace(at, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, first_row=first)
        dq, dk, dv = block(queries, douts, dlses, keys, values, seen, scale, mods, here)
        made[0][rows] = dq[0].permute(2, 0, 1, 3).flatten(1, 2).double()
        made[1].add_(dk[0].transpose(0, 1).double())
        made[2].add_(dv[0].transpose(0, 1).double())


def _block_exact(queries: Tensor, dout: Tensor, dlse: Tensor | None, keys: Tensor, values: Tensor, mask: Tensor,
                 scale: float, mods: ExpressionMods, at: BlockOffset, out_dtype: torch.dtype = torch.float64
                 ) -> Gradients:
    probs, slopes = _probs(queries, keys, mask, scale, mods, at)
    out = _matmul(probs, values).to(out_dtype).double()
    delta = (dout * out).sum(-1, keepdim=True) - (0.0 if dlse is None else dlse[..., None])
    dscores = probs * (_matmul(dout, values.mT) - delta) * slopes
    return _matmul(dscores, keys) * scale, _summed(dscores, queries) * scale, _summed(probs, dout)


def _block_sizes(queries: Tensor, dout: Tensor, dlse: Tensor | None, keys: Tensor, values: Tensor, mask: Tensor,
                 scale: float, mods: ExpressionMods, at: BlockOffset) -> Gradients:
    (probs, slopes), out_sizes = _probs(queries, keys, mask, scale, mods, at), dout.abs()
    out = _matmul(probs, values).abs()
    delta = (out_sizes * out).sum(-1, keepdim=True) + (0.0 if dlse is None else dlse[..., None].abs())
    dscores = probs * (_matmul(out_sizes, values.mT.abs()) + delta) * slopes.abs()
    return _matmul(dscores, keys.abs()) * scale, _summed(dscores, queries.abs()) * scale, _summed(probs, out_sizes)


def _probs(queries: Tensor, keys: Tensor, mask: Tensor, scale: float, mods: ExpressionMods, at: BlockOffset
           ) -> tuple[Tensor, Tensor]:
    """P, and the derivative of scores by what they were before the expression: 0 where P is 0 for its mask."""
    scores = _matmul(queries, keys.mT) * scale
    slopes, mask = torch.ones_like(scores), mods.mask_mod(at, scores, mask)
    if mods.score is not None:
        with torch.enable_grad():
            before = scores.detach().requires_grad_()
            after = mods.score_mod(at, before, "float64")
            slopes = torch.autograd.grad((after + 0.0 * before).sum(), before)[0]  # also where it reads no score
        scores = after.detach()
    scores = scores.masked_fill(~mask, -torch.inf)
    if mods.sink:  # a key of its own, without a value
        scores = torch.cat((scores, _sinks(mods, scores).expand(*scores.shape[:-1], 1)), -1)
    probs = torch.softmax(scores, -1)[..., :mask.shape[-1]].masked_fill(~mask, 0.0)  # a row without keys: NaN -> 0
    return probs, slopes.masked_fill(~mask, 0.0)


def _summed(weights: Tensor, rows: Tensor) -> Tensor:
    """weights^T @ rows, over the rows of all heads of a group: [b, h_kv, n, d]."""
    return weights.flatten(2, 3).mT @ rows.flatten(2, 3)


def _block_plain(queries: Tensor, dout: Tensor, dlse: Tensor | None, keys: Tensor, values: Tensor, mask: Tensor,
                 scale: float, mods: ExpressionMods, at: BlockOffset) -> Gradients:
    with torch.enable_grad():
        leaves = tuple(x.detach().requires_grad_() for x in (queries, keys, values))
        queries, keys, values = leaves
        results = _block_lowprec(queries, keys, values, mask, scale, mods, at)
        count = 1 if dlse is None else 2
        dq, dk, dv = torch.autograd.grad(results[:count], leaves, (dout, dlse)[:count])
    return dq, dk, dv


_BLOCKS = {"exact": _block_exact, "plain": _block_plain, "sizes": _block_sizes}


def expected(exact: Gradients, plain: Gradients, rounded: Gradients, sizes: Gradients,
             noise: tuple[float, float, float]) -> Truth:
    """What `gradients` gave, as the comparison takes it. `noise`: what sums in fp32 may add to the error of each.

    The yardstick is the worse of torch's and the rounded ones, element by element. Where a row has few keys, dP - delta
    almost cancels, and the rounding of `out` in delta alone can make twice the error of torch, which keeps P instead.
    dS is a difference that almost cancels wherever one key has most of a row's weight. So the error of a row is
    measured against what it is the sum of: against its own values, that of torch varies by orders of magnitude.
    """
    axes = ("batch", "row", "head", "column") if exact[0].dim() == 4 else ("token", "head", "column")
    worse = [torch.where((other - right).abs() > (own.double() - right).abs(), other.to(own.dtype), own)
             for right, own, other in zip(exact, plain, rounded, strict=True)]
    return {name: Expected(right, axes, own, extra, size)
            for name, right, own, extra, size in zip(("dq", "dk", "dv"), exact, worse, noise, sizes, strict=True)}
