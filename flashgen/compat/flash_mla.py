"""FlashMLA's two functions for dense decoding on Hopper, over flashgen.mla_decode.

As there: metadata is empty until the first call fills it, later calls must fit it, and lse is +inf where a query sees
no key, and leaves the sink out. Beyond it: pages of any size, a sink, and as few query heads as there are.
"""
from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from flashgen.errors import UnsupportedError
from flashgen.runtime.ops.arguments import flag, require_tensors
from flashgen.runtime.ops.mla_decode.call import mla_decode
from flashgen.runtime.ops.mla_decode.schedule import mla_schedule
from flashgen.runtime.ops.mla_decode.signature import MlaSchedule


class MetadataError(UnsupportedError, AssertionError):
    """Arguments that the original asserts against."""


@dataclass
class FlashMLASchedMeta:
    """The schedule of the calls that share it, which must have the same sizes, and the same lengths."""

    @dataclass
    class Config:
        b: int
        s_q: int
        h_q: int
        page_block_size: int
        h_k: int
        causal: bool
        is_fp8_kvcache: bool
        topk: int | None
        extra_page_block_size: int | None
        extra_topk: int | None

    have_initialized: bool = False
    config: Config | None = None
    tile_scheduler_metadata: Tensor | None = None  # ours, not the original's: [rows, 8] int32
    num_splits: Tensor | None = None               # the original's; ours are part of the former


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """(empty metadata, None). Takes, and needs not, the arguments of older versions (cache_seqlens, ...)."""
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
        q: Tensor, k_cache: Tensor, block_table: Tensor | None, cache_seqlens: Tensor | None, head_dim_v: int,
        tile_scheduler_metadata: FlashMLASchedMeta, num_splits: None = None, softmax_scale: float | None = None,
        causal: bool = False, is_fp8_kvcache: bool = False, indices: Tensor | None = None,
        attn_sink: Tensor | None = None, extra_k_cache: Tensor | None = None,
        extra_indices_in_kvcache: Tensor | None = None, topk_length: Tensor | None = None,
        extra_topk_length: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(out [batch, seqlen_q, num_heads_q, head_dim_v], softmax_lse [batch, num_heads_q, seqlen_q] fp32).

    Args:
        q: [batch, seqlen_q, num_heads_q, head_dim], bf16 or fp16.
        k_cache: [num_blocks, page_block_size, 1, head_dim], of q's dtype.
        block_table: [batch, max_num_blocks_per_seq] int32.
        cache_seqlens: [batch] int32.
        head_dim_v: 512.
        tile_scheduler_metadata: of get_mla_metadata; filled by the first call that gets it.
        num_splits: None.
        softmax_scale: head_dim ** -0.5 by default.
        causal: align the last query with the last key.
        attn_sink: [num_heads_q] fp32; out is scaled by exp(lse) / (exp(lse) + exp(attn_sink)).

    Raises MetadataError where the original asserts, and UnsupportedError for what flashgen has not: fp8 caches, sparse
    indices, extra caches and top-k lengths.
    """
    meta = tile_scheduler_metadata
    sparse = {"indices": indices, "extra_k_cache": extra_k_cache, "extra_indices_in_kvcache": extra_indices_in_kvcache,
              "topk_length": topk_length, "extra_topk_length": extra_topk_length}
    for problem in _problems(q, k_cache, block_table, cache_seqlens, meta, num_splits, is_fp8_kvcache, sparse):
        raise problem
    assert cache_seqlens is not None
    causal = flag("causal", causal)
    config = FlashMLASchedMeta.Config(q.shape[0], q.shape[1], q.shape[2], k_cache.shape[1], k_cache.shape[2], causal,
                                      False, None, None, None)
    if meta.have_initialized:
        _check_config(meta.config, config)
        if not isinstance(meta.tile_scheduler_metadata, Tensor):
            raise MetadataError("the metadata says that a call has filled it, and holds no schedule",
                                where="tile_scheduler_metadata", allowed="the first result of get_mla_metadata()")
        schedule = MlaSchedule(meta.tile_scheduler_metadata, config.b, config.h_q, config.s_q)
    else:
        schedule = mla_schedule(cache_seqlens, config.h_q, config.s_q)
    out, lse = mla_decode(q, k_cache, cache_seqlens, page_table=block_table, causal=causal, softmax_scale=softmax_scale,
                          sink=attn_sink, lse_counts_sink=False, schedule=schedule, head_dim_v=head_dim_v,
                          return_lse=True)
    if not meta.have_initialized:  # only now: a refused call leaves it empty
        meta.have_initialized, meta.config, meta.tile_scheduler_metadata = True, config, schedule.rows
    return out, lse.masked_fill_(lse == -math.inf, math.inf)


def _problems(q: Tensor, k_cache: Tensor, block_table: Tensor | None, cache_seqlens: Tensor | None, meta: object,
              num_splits: object, is_fp8: object, sparse: dict[str, Tensor | None]) -> Iterator[UnsupportedError]:
    if not isinstance(meta, FlashMLASchedMeta):
        yield MetadataError(f"tile_scheduler_metadata is of type {type(meta).__name__}",
                            where="tile_scheduler_metadata", allowed="the first result of get_mla_metadata()")
    if num_splits is not None:
        yield MetadataError(f"num_splits is of type {type(num_splits).__name__}", where="num_splits", allowed="None",
                            nearest="the second result of get_mla_metadata()")
    if flag("is_fp8_kvcache", is_fp8):
        yield UnsupportedError("an fp8 cache", where="is_fp8_kvcache", allowed="False: bf16 and fp16 caches")
    for name, value in sparse.items():
        if value is not None:
            yield UnsupportedError("sparse decoding is not there", where=name, allowed="None: dense decoding")
    for name, value in (("block_table", block_table), ("cache_seqlens", cache_seqlens)):
        if value is None:
            yield MetadataError(f"{name} is None", where=name, allowed="a tensor, which dense decoding needs",
                                next="flashgen.mla_decode takes a cache without pages" if name == "block_table" else "")
    require_tensors(False, q=q, k_cache=k_cache, block_table=block_table, cache_seqlens=cache_seqlens)
    if q.dim() != 4 or k_cache.dim() != 4:
        yield UnsupportedError(f"q has shape {tuple(q.shape)}, k_cache {tuple(k_cache.shape)}", where="q, k_cache",
                               allowed="[batch, seqlen_q, num_heads_q, head_dim] and "
                               "[num_blocks, page_block_size, 1, head_dim]")


def _check_config(before: FlashMLASchedMeta.Config | None, now: FlashMLASchedMeta.Config) -> None:
    for field in fields(now):
        first, given = getattr(before, field.name), getattr(now, field.name)
        if first != given:
            raise MetadataError(f"{field.name} is {given}, and was {first} in the call that filled the metadata",
                                where="tile_scheduler_metadata", allowed=str(first),
                                next="give a fresh get_mla_metadata() where sizes or lengths change")
