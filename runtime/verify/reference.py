"""Naive attention in fp64: the right answer (contracts.md, values 1 to 7 and 9), written to be read, not to be fast.

`lowprec` is the same walk with torch's plain matmul-softmax-matmul in the inputs' own dtype: the yardstick of the
accuracy contract.
"""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flashgen.runtime.verify.compare import Expected, Truth
from flashgen.runtime.verify.expression_mods import BlockOffset, ExpressionMods

LSE_ABSOLUTE = 1e-5     # for scores of unit variance; the rounding of q . k in fp32 grows with what multiplies it
CHUNK_SCORES = 1 << 24  # scores alive at once: 128 MiB in fp64, so that long sequences fit beside their kernel

# (queries [b, h_kv, group, rows, d], keys [b, h_kv, n, d], values [b, h_kv, n, d_v], mask [rows, n], scale, mods,
# where the block is) -> (out [b, h_kv, group, rows, d_v], lse [b, h_kv, group, rows])
_Block = Callable[[Tensor, Tensor, Tensor, Tensor, float, ExpressionMods, BlockOffset], tuple[Tensor, Tensor]]


def reference(q: Tensor, k: Tensor, v: Tensor, *, causal: bool | str = False, window: tuple[int, int] = (-1, -1),
              softmax_scale: float | None = None, cu_seqlens_q: Tensor | None = None,
              cu_seqlens_kv: Tensor | None = None, mods: ExpressionMods | None = None) -> tuple[Tensor, Tensor]:
    """(out, lse) in fp64 from inputs as they are, already rounded.

    Dense: q [batch, seqlen_q, num_heads_q, head_dim_qk] -> out [.., head_dim_v], lse [batch, num_heads_q, seqlen_q].
    Varlen: q [total_q, num_heads_q, head_dim_qk] -> out [total_q, ..], lse [num_heads_q, total_q]; rows that belong
    to no sequence get out = 0, lse = -inf, as rows that see no key do.
    A NaN or inf in k or v reaches exactly the rows that see it. `mods`: what a spec's expressions do to it.
    """
    return _attend(q, k, v, causal, window, softmax_scale, cu_seqlens_q, cu_seqlens_kv, torch.float64,
                   _block_fp64, mods or ExpressionMods())


def lowprec(q: Tensor, k: Tensor, v: Tensor, *, causal: bool | str = False, window: tuple[int, int] = (-1, -1),
            softmax_scale: float | None = None, cu_seqlens_q: Tensor | None = None,
            cu_seqlens_kv: Tensor | None = None, mods: ExpressionMods | None = None) -> Tensor:
    """The output of plain matmul, softmax, matmul in q's dtype; its NaN and inf positions mean nothing."""
    return _attend(q, k, v, causal, window, softmax_scale, cu_seqlens_q, cu_seqlens_kv, q.dtype, _block_lowprec,
                   mods or ExpressionMods())[0]


def expected(out: Tensor, lse: Tensor, plain: Tensor, head_dim: int, softmax_scale: float | None) -> Truth:
    """What `reference` and `lowprec` gave, as the comparison takes it. Dense or varlen, as in `reference`."""
    scale = head_dim ** -0.5 if softmax_scale is None else softmax_scale
    out_axes, lse_axes = ((("batch", "row", "head", "column"), ("batch", "head", "row")) if out.dim() == 4 else
                          (("token", "head", "column"), ("head", "token")))
    return {"out": Expected(out, out_axes, plain),
            "lse": Expected(lse, lse_axes, absolute=LSE_ABSOLUTE * max(1.0, scale * head_dim ** 0.5))}


def visible(seqlen_q: int, seqlen_kv: int, *, causal: bool | str = False, window: tuple[int, int] = (-1, -1),
            first: int = 0, last: int | None = None, device: torch.device | str = "cpu") -> Tensor:
    """Bool [last - first, seqlen_kv]: whether query row `first + r` sees key j."""
    row = torch.arange(first, seqlen_q if last is None else last, device=device)[:, None]
    key = torch.arange(seqlen_kv, device=device)[None, :]
    diagonal = row if causal == "top_left" else row + (seqlen_kv - seqlen_q)
    left, right = window
    if causal:
        right = 0
    mask = torch.ones(row.shape[0], seqlen_kv, dtype=torch.bool, device=device)
    if left >= 0:
        mask &= key >= diagonal - left
    if right >= 0:
        mask &= key <= diagonal + right
    return mask


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool | str, window: tuple[int, int], softmax_scale: float | None,
            cu_seqlens_q: Tensor | None, cu_seqlens_kv: Tensor | None, dtype: torch.dtype,
            block: _Block, mods: ExpressionMods) -> tuple[Tensor, Tensor]:
    """Zeros and -inf (or the sink) everywhere, then each sequence writes its rows."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=dtype, device=q.device)
    if (cu_seqlens_q is None) != (cu_seqlens_kv is None):
        raise ValueError("cu_seqlens_q and cu_seqlens_kv come together")
    packed = cu_seqlens_q is not None
    lse = torch.full((q.shape[1], q.shape[0]) if packed else (q.shape[0], q.shape[2], q.shape[1]), -torch.inf,
                     dtype=dtype, device=q.device)
    if mods.sink:
        lse.copy_(mods.params["sink"][:, None])
    if cu_seqlens_q is None or cu_seqlens_kv is None:
        _dense(q, k, v, causal, window, scale, block, mods, (0, 0, 0), out, lse)
        return out, lse
    starts_q, starts_kv = cu_seqlens_q.tolist(), cu_seqlens_kv.tolist()
    for i in range(len(starts_q) - 1):
        rows, keys = slice(*starts_q[i:i + 2]), slice(*starts_kv[i:i + 2])
        _dense(q[None, rows], k[None, keys], v[None, keys], causal, window, scale, block, mods,
               (i, starts_q[i], starts_kv[i]), out[None, rows], lse[None, :, rows])
    return out, lse


def _dense(q: Tensor, k: Tensor, v: Tensor, causal: bool | str, window: tuple[int, int], scale: float, block: _Block,
           mods: ExpressionMods, begin: tuple[int, int, int], out: Tensor, lse: Tensor) -> None:
    """Fill `out` and `lse`, a few batches and query rows at a time. `begin`: the first sequence's number, and where its
    rows begin in packed tensors."""
    batch, seqlen_q, num_heads_q, _ = q.shape
    seqlen_kv, num_heads_kv = k.shape[1:3]
    if 0 in (batch, seqlen_q, seqlen_kv, num_heads_q):
        return
    scores_per_row = num_heads_q * seqlen_kv
    rows_step = min(seqlen_q, max(1, CHUNK_SCORES // scores_per_row))
    batch_step = max(1, CHUNK_SCORES // (scores_per_row * rows_step))
    for b in range(0, batch, batch_step):
        bs = slice(b, b + batch_step)
        keys, values = (x[bs].to(out.dtype).transpose(1, 2) for x in (k, v))
        for r in range(0, seqlen_q, rows_step):
            rs = slice(r, min(r + rows_step, seqlen_q))
            # query head h reads kv head h // group, so a kv head's queries lie side by side
            queries = q[bs, rs].to(out.dtype).unflatten(2, (num_heads_kv, -1)).permute(0, 2, 3, 1, 4)
            mask = visible(seqlen_q, seqlen_kv, causal=causal, window=window, first=rs.start, last=rs.stop,
                           device=q.device)
            at = BlockOffset(seqlen_q, seqlen_kv, begin[0] + b, rs.start, *begin[1:], causal == "top_left")
            part, part_lse = block(queries, keys, values, mask, scale, mods, at)
            out[bs, rs] = part.permute(0, 3, 1, 2, 4).flatten(2, 3)
            lse[bs, :, rs] = part_lse.flatten(1, 2)


def _matmul(x: Tensor, y: Tensor) -> Tensor:
    """[b, h, group, rows, n] @ [b, h, n, m], without a copy of y for each head of the group."""
    product: Tensor = (x.flatten(2, 3) @ y).unflatten(2, x.shape[2:4])
    return product


def _block_fp64(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, mods: ExpressionMods,
                at: BlockOffset) -> tuple[Tensor, Tensor]:
    scores = mods.score_mod(at, _matmul(queries, keys.mT) * scale, "float64")
    mask = mods.mask_mod(at, scores, mask)
    if not mods.normalized:
        weights = scores.masked_fill(~mask, 0.0)
        return _weighted(weights, values, mask), torch.full_like(weights[..., 0], -torch.inf)
    scores = scores.masked_fill(~mask, -torch.inf)
    row_max = scores.amax(-1, keepdim=True)
    if mods.sink:
        row_max = row_max.maximum(_sinks(mods, scores))
    shift = row_max.masked_fill(row_max == -torch.inf, 0.0)  # -inf - (-inf) is NaN; a row without keys sums to 0
    weights = torch.exp(scores - shift)
    row_sum = weights.sum(-1, keepdim=True)
    if mods.sink:
        row_sum = row_sum + torch.exp(_sinks(mods, scores) - shift)
    weights = weights / row_sum.masked_fill(row_sum == 0, 1.0)
    return _weighted(weights, values, mask), (shift + row_sum.log()).squeeze(-1)


def _weighted(weights: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """weights @ values where a NaN or inf value counts only for rows that see it (0 * NaN must not leak)."""
    finite = values.isfinite()
    out = _matmul(weights, values.where(finite, 0.0))
    if not finite.all():
        sees = mask.to(values.dtype).expand_as(weights)
        for special in (torch.nan, torch.inf, -torch.inf):
            here = values.isnan() if special != special else values == special
            out = out + torch.where(_matmul(sees, here.to(values.dtype)) > 0, special, 0.0)
    return out


def _sinks(mods: ExpressionMods, scores: Tensor) -> Tensor:
    """[1, h_kv, group, 1, 1]"""
    sink: Tensor = mods.params["sink"].to(scores.dtype)
    return sink.reshape(1, scores.shape[1], scores.shape[2], 1, 1)


def _block_lowprec(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, mods: ExpressionMods,
                   at: BlockOffset) -> tuple[Tensor, Tensor]:
    scores = mods.score_mod(at, _matmul(queries, keys.mT) * scale, "float32")
    mask = mods.mask_mod(at, scores, mask)
    if not mods.normalized:
        return _matmul(scores.masked_fill(~mask, 0.0), values.nan_to_num(0.0, 0.0, 0.0)), scores[..., 0]
    scores = scores.masked_fill(~mask, -torch.inf)
    if mods.sink:  # a key of its own, without a value
        sinks = _sinks(mods, scores).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sinks), -1)
        weights = torch.softmax(scores, -1)[..., :-1]
        return _matmul(weights, values.nan_to_num(0.0, 0.0, 0.0)), scores.logsumexp(-1)
    weights = torch.softmax(scores, -1).masked_fill(~mask, 0.0)  # a row without keys: NaN -> 0
    return _matmul(weights, values.nan_to_num(0.0, 0.0, 0.0)), scores.logsumexp(-1)
