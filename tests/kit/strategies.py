"""Hypothesis strategies over attention problems. Edge lengths are always in the draw."""
from __future__ import annotations

from hypothesis import strategies as st

from flashgen.runtime.ops.attention.edges import HEADS, Mask
from flashgen.runtime.ops.attention.problem import Problem

HEAD_DIMS = (8, 32, 40, 64, 72, 96, 128)
ALL_MASKS: tuple[Mask, ...] = (
    (False, (-1, -1)), (True, (-1, -1)), ("top_left", (-1, -1)), (False, (0, 0)), (False, (-1, 3)), (False, (5, -1)),
    (False, (17, 40)), (True, (7, -1)), ("top_left", (0, 2)), (False, (2**31 - 1, 2**31 - 1)),
)


def edge_lengths(tile: int) -> tuple[int, ...]:
    return (0, 1, tile - 1, tile, tile + 1, 2 * tile + 3)


def lengths(tile: int) -> st.SearchStrategy[int]:
    return st.sampled_from(edge_lengths(tile)) | st.integers(0, 3 * tile)


@st.composite
def problems(draw: st.DrawFn, *, masks: tuple[Mask, ...] = ALL_MASKS, varlen: bool | None = None,
             dtype: str | None = None, head_dims: tuple[int, int] | None = None, tile_m: int = 16,
             tile_n: int = 16) -> Problem:
    """A problem; what is named is fixed, the rest is drawn. `tile_m` and `tile_n` place the edge lengths."""
    causal, window = draw(st.sampled_from(masks))
    num_heads_q, num_heads_kv = draw(st.sampled_from(HEADS) | st.sampled_from([(2, 2), (14, 2), (7, 1)]))
    head_dim_qk, head_dim_v = head_dims or (draw(st.sampled_from(HEAD_DIMS)), draw(st.sampled_from(HEAD_DIMS)))
    seqlen_q: int | tuple[int, ...]
    seqlen_kv: int | tuple[int, ...]
    if draw(st.booleans()) if varlen is None else varlen:
        pairs = draw(st.lists(st.tuples(lengths(tile_m), lengths(tile_n)), max_size=5))
        batch, seqlen_q, seqlen_kv = len(pairs), tuple(p[0] for p in pairs), tuple(p[1] for p in pairs)
    else:
        batch, seqlen_q, seqlen_kv = draw(st.integers(0, 3)), draw(lengths(tile_m)), draw(lengths(tile_n))
    return Problem(
        batch, seqlen_q, seqlen_kv, num_heads_q, num_heads_kv, head_dim_qk, head_dim_v, causal=causal, window=window,
        dtype=dtype or draw(st.sampled_from(["bf16", "fp16"])),
        softmax_scale=draw(st.none() | st.floats(0.01, 1.5)),
        tail=draw(st.sampled_from([0, 3])) if isinstance(seqlen_q, tuple) else 0,
        seed=draw(st.integers(0, 2**16)))
