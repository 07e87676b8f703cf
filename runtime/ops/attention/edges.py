"""Problems at the edges of one variant's own tiles: the lengths, masks, head ratios and scales where kernels break."""
from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import Any

from flashgen.codegen.plan import Plan
from flashgen.codegen.spec.spec import Spec
from flashgen.runtime.ops.attention.problem import Problem

INT32_MAX = 2**31 - 1
Mask = tuple[bool | str, tuple[int, int]]  # (causal, window)
Lengths = int | tuple[int, ...]

FULL: Mask = (False, (-1, -1))
CAUSAL: tuple[Mask, ...] = ((True, (-1, -1)), ("top_left", (-1, -1)))
WINDOWS: tuple[Mask, ...] = (
    (False, (0, 0)), (False, (-1, 3)), (False, (5, -1)), (False, (17, 64)), (False, (INT32_MAX, INT32_MAX)),
    (True, (-1, -1)), (True, (33, -1)), ("top_left", (7, 2)),
)
HEADS = ((6, 2), (1, 1), (5, 1), (4, 4))  # (num_heads_q, num_heads_kv): ratios 3, 1, 5, 1
BATCHES = (1, 3)
MANY_TILES = (3, (45, 9))  # (batch, heads): with three query tiles each, more than two per SM, and on 132 SMs nine over
KEYS_WORTH_CUTTING = 1400   # of a last round of tiles, whatever the kernel: families/fa3/split.py
SCALES = (None, 0.3, None, 1.0, 0.01)     # cycles of 4, 2 and 5: every combination turns up


def masks(spec: Spec) -> tuple[Mask, ...]:
    """The (causal, window) arguments that this variant serves."""
    return WINDOWS if spec.window else CAUSAL if spec.causal else (FULL,)


def tile_shape(plan: Plan) -> tuple[int, int, int]:
    """(query rows of a tile, keys of a tile, stages of the ring), by the names that all families give them."""
    return plan.constant("BLOCK_M"), plan.constant("BLOCK_N"), plan.constant("NUM_STAGES")


def problem_of(spec: Spec, batch: int, seqlen_q: Lengths, seqlen_kv: Lengths, heads: tuple[int, int], mask: Mask,
               **more: Any) -> Problem:
    """A call of the variant. `heads`: (num_heads_q, num_heads_kv)."""
    return Problem(batch, seqlen_q, seqlen_kv, *heads, spec.head_dim_qk, spec.head_dim_v, *mask, spec.dtype, **more)


def length_pairs(tile_m: int, tile_n: int, num_stages: int) -> tuple[tuple[int, int], ...]:
    """(seqlen_q, seqlen_kv): nothing, one, around one tile, past two, and a ring of stages that wraps twice."""
    wrap = (2 * num_stages + 1) * tile_n + 1
    return ((0, tile_n), (tile_m, 0), (1, 1), (1, tile_n + 1), (tile_m - 1, tile_n - 1), (tile_m, tile_n),
            (tile_m + 1, tile_n + 1), (2 * tile_m + 3, tile_n - 1), (2 * tile_m + 1, 2 * tile_n + 1),
            (1, 2 * tile_n + 3), (tile_m, wrap))


def edge_problems(spec: Spec, tile_m: int, tile_n: int, num_stages: int, seed: int) -> Iterator[Problem]:
    """Dense: each mask with each pair of lengths. Varlen: each mask with all pairs as the sequences of one call.

    Then each mask with so many tiles that blocks that stay for more than one get several.
    """
    heads, batches, scales = cycle(HEADS), cycle(BATCHES), cycle(SCALES)
    pairs = length_pairs(tile_m, tile_n, num_stages)

    def problem(batch: int, seqlen_q: Lengths, seqlen_kv: Lengths, mask: Mask, tail: int = 0,
                heads_of: tuple[int, int] | None = None) -> Problem:
        return problem_of(spec, batch, seqlen_q, seqlen_kv, heads_of or next(heads), mask, softmax_scale=next(scales),
                          tail=tail, seed=seed)

    for mask in masks(spec):
        if spec.kv_layout == "dense":
            yield problem(0, tile_m, tile_n, mask)
            for seqlen_q, seqlen_kv in pairs:
                yield problem(next(batches), seqlen_q, seqlen_kv, mask)
        else:
            yield problem(0, (), (), mask)
            for order, tail in ((pairs, 0), (pairs[::-1], 7), (pairs[-1:], 0)):
                yield problem(len(order), tuple(p[0] for p in order), tuple(p[1] for p in order), mask, tail)
        batch, many_heads = MANY_TILES
        lengths = (2 * tile_m + 1, 2 * tile_n + 1)
        if spec.kv_layout == "dense":
            yield problem(batch, *lengths, mask, heads_of=many_heads)
        else:
            yield problem(batch, (lengths[0],) * batch, (lengths[1],) * batch, mask, heads_of=many_heads)


def company_problem(spec: Spec, tile_m: int, mask: Mask, seed: int) -> Problem:
    """Three requests with as many queries as keys: the subject of the bitwise identities."""
    seqlen: Lengths = 2 * tile_m + 5
    if spec.kv_layout == "varlen":
        seqlen = (2 * tile_m + 5, 1, tile_m - 1)
    return problem_of(spec, 3, seqlen, seqlen, (6, 2), mask, seed=seed)


def emulated_masks(spec: Spec) -> tuple[Mask, ...]:
    """Fewer of them, with every loop and both alignments."""
    return masks(spec) if not spec.window else (
        (False, (0, 0)), (False, (17, 64)), (False, (-1, 3)), (True, (33, -1)), ("top_left", (7, 2)))


def emulated_problems(spec: Spec, tile_m: int, tile_n: int, num_stages: int, seed: int,
                      persistent: bool = False) -> Iterator[Problem]:
    """As few blocks as reach every branch: three trips round the ring, tiles that are first, last, whole, masked,
    ragged and empty, blocks without a key, and sequences without a query.

    With `persistent`, for kernels whose blocks stay for several tiles, also six tiles: two more than the emulator has
    SMs, and where the kernel cuts such a last round along its keys, enough of them to make it worth it.
    """
    pairs = ((tile_m // 2 + 3, 3 * num_stages * tile_n + 1), (2 * tile_m, tile_n - 1), (0, 5), (1, 0))
    scales = cycle((1.0, None, 0.3))  # the first makes scores far enough apart to raise the maximum
    for mask in emulated_masks(spec):
        calls: list[tuple[int, Lengths, Lengths, tuple[int, int], int]]
        if spec.kv_layout == "dense":
            calls = [(1, *pairs[0], (1, 1), 0), (2, *pairs[1], (2, 1), 0), (1, *pairs[3], (1, 1), 0)]
            if persistent:
                keys = KEYS_WORTH_CUTTING if spec.split else 2 * tile_n
                calls.append((1, tile_m - 3, keys + 1, (6, 1), 0))
        else:
            calls = [(len(pairs), tuple(p[0] for p in pairs), tuple(p[1] for p in pairs), (2, 1), 3)]
        for batch, seqlen_q, seqlen_kv, heads, tail in calls:
            yield problem_of(spec, batch, seqlen_q, seqlen_kv, heads, mask, softmax_scale=next(scales), tail=tail,
                             seed=seed)
