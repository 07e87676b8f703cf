"""Problems for gradients at the edges of one variant's own tiles. Blocks own key tiles there and walk over queries."""
from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

from flashgen.codegen.plan import Plan
from flashgen.codegen.spec.spec import Spec
from flashgen.runtime.ops.attention.edges import (
    HEADS,
    MANY_TILES,
    SCALES,
    Lengths,
    Mask,
    edge_problems,
    emulated_masks,
    masks,
    problem_of,
)
from flashgen.runtime.ops.attention_backward.problem import BackwardProblem

STAGES = 3  # query tiles that a block may hold at a time, at most


def tile_shape(plan: Plan) -> tuple[int, int]:
    """(query rows of a tile, keys of a tile): all three kernels of a call have them."""
    return plan.constant("BLOCK_M"), plan.constant("BLOCK_N")


def backward_problems(spec: Spec, tiles: tuple[int, int], seed: int) -> Iterator[BackwardProblem]:
    """The forward's, whose lengths lie around both tiles, and calls whose ring of query tiles wraps. Every second has
    a gradient of lse."""
    tile_m, tile_n = tiles
    lse_gradient, heads, scales = cycle((False, True)), cycle(HEADS), cycle(SCALES)
    for problem in edge_problems(spec, tile_m, tile_n, STAGES, seed):
        yield BackwardProblem.of(problem, next(lse_gradient))
    wrap = (2 * STAGES + 1) * tile_m + 1
    for mask in masks(spec):
        pairs = ((wrap, tile_n), (wrap, 2 * tile_n + 3), (2 * tile_m + 3, 1))
        for batch, seqlen_q, seqlen_kv, tail in _calls(spec, pairs):
            problem = problem_of(spec, batch, seqlen_q, seqlen_kv, next(heads), mask, softmax_scale=next(scales),
                                 tail=tail, seed=seed)
            yield BackwardProblem.of(problem, next(lse_gradient))


def emulated_problems(spec: Spec, tiles: tuple[int, int], seed: int) -> Iterator[BackwardProblem]:
    """As few blocks as reach every branch: trips round a ring of query tiles, tiles that are first, last, whole, masked
    and ragged, heads that share keys, keys without queries and queries without keys."""
    tile_m, tile_n = tiles
    pairs = ((2 * STAGES * tile_m + 1, tile_n // 2 + 3), (tile_m - 1, tile_n + 1), (0, 5), (1, 0))
    scales, heads, lse_gradient = cycle((None, 1.0, 0.3)), cycle(((1, 1), (2, 1))), cycle((False, True))
    for mask in emulated_masks(spec):
        for batch, seqlen_q, seqlen_kv, tail in _calls(spec, pairs):
            problem = problem_of(spec, batch, seqlen_q, seqlen_kv, next(heads), mask, softmax_scale=next(scales),
                                 tail=tail, seed=seed)
            yield BackwardProblem.of(problem, next(lse_gradient))


def few_problems(spec: Spec, tiles: tuple[int, int]) -> Iterator[BackwardProblem]:
    """A small call, and one with many tiles."""
    (tile_m, tile_n), window = tiles, (97, 30) if spec.window else (-1, -1)
    for batch, seqlen_q, seqlen_kv, heads in ((2, (STAGES + 2) * tile_m + 17, tile_n + 5, (4, 2)),
                                              (MANY_TILES[0], 2 * tile_m + 1, 2 * tile_n + 1, MANY_TILES[1])):
        problem = problem_of(spec, batch, seqlen_q, seqlen_kv, heads, (spec.causal, window))
        yield BackwardProblem.of(problem, lse_gradient=True)


def company_problems(spec: Spec, tiles: tuple[int, int], mask: Mask, seed: int) -> Iterator[BackwardProblem]:
    """Three requests, the subject of the bitwise identities: with keys of several tiles, and of one. In the latter,
    each element of dq is a sum of one part, which no order can change."""
    tile_m, tile_n = tiles
    dense = spec.kv_layout == "dense"
    for keys in (2 * tile_n + 5, tile_n):
        seqlen_q: Lengths = 2 * tile_m + 5 if dense else (2 * tile_m + 5, 1, tile_m - 1)
        seqlen_kv: Lengths = keys if dense else (keys, keys // 2, 1)
        yield BackwardProblem.of(problem_of(spec, 3, seqlen_q, seqlen_kv, (6, 2), mask, seed=seed), lse_gradient=True)


def _calls(spec: Spec, pairs: tuple[tuple[int, int], ...]) -> Iterator[tuple[int, Lengths, Lengths, int]]:
    """(batch, seqlen_q, seqlen_kv, tail): dense, a call for each pair; varlen, one call of all as its sequences."""
    if spec.kv_layout == "dense":
        for number, pair in enumerate(pairs):
            yield 1 + number % 2, *pair, 0
    else:
        yield len(pairs), tuple(q for q, _ in pairs), tuple(kv for _, kv in pairs), 3
