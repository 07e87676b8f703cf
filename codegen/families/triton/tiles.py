"""Tiles of triton: powers of two, as its blocks are. Where no row lists the target, Triton times those of TRIED.

A block of fp32 with `rows * columns` elements takes as many registers as that, divided among its threads. The forward
keeps S (m * n) and the output (m * columns of v), the backward two of S and the gradients. Rows keep both below 200 of
255 registers, and the operands of all stages below the shared memory of the card.
"""
from __future__ import annotations

import functools

from flashgen.codegen.families.shared.tiles import Row, TileTable

HOPPER = frozenset({"sm_90", "sm_90a", "sm_100a"})
A100 = frozenset({"sm_80"})
SMALL_SMEM = frozenset({"sm_86", "sm_89", "sm_120"})
KINDS = ("whole", "key_gradients", "query_gradients")

_hopper = functools.partial(Row, targets=HOPPER, source=(
    "S and output in registers of two wgmma warpgroups; not timed"))
_a100 = functools.partial(Row, targets=A100, source=(
    "the sm_90 tile shrunk to 164 KiB of shared memory per SM; not timed"))
_small = functools.partial(Row, targets=SMALL_SMEM, source=(
    "the sm_90 tile shrunk to 100 KiB of shared memory per SM; not timed"))
_BY_WINDOW = frozenset({"window"})
_KEYS, _QUERIES = frozenset({"key_gradients"}), frozenset({"query_gradients"})

_ROWS: tuple[Row, ...] = (
    _hopper(64, 64, m=128, n=128, warps=8, stages=3),
    _hopper(128, 128, m=128, n=128, warps=8, stages=2),
    _hopper(256, 128, m=128, n=64, warps=8, stages=2),
    _hopper(256, 256, m=128, n=64, warps=8, stages=2),
    _a100(64, 64, masks=_BY_WINDOW, m=128, n=64, warps=8, stages=3),  # three loops take more registers
    _a100(64, 64, m=128, n=64, warps=4, stages=3),
    _a100(128, 128, m=128, n=64, warps=8, stages=2),
    _a100(256, 256, m=64, n=32, warps=4, stages=2),
    _small(64, 64, m=128, n=64, warps=8, stages=3),
    _small(128, 128, m=128, n=32, warps=8, stages=2),
    _small(256, 256, m=64, n=32, warps=4, stages=1),
    _hopper(64, 64, kinds=_KEYS, m=64, n=128, warps=8, stages=3),
    _hopper(128, 128, kinds=_KEYS, m=64, n=128, warps=8, stages=2),
    _hopper(256, 256, kinds=_KEYS, m=64, n=64, warps=8, stages=1),
    _hopper(64, 64, kinds=_QUERIES, m=128, n=64, warps=8, stages=3),
    _hopper(128, 128, kinds=_QUERIES, m=128, n=64, warps=8, stages=2),
    _hopper(256, 256, kinds=_QUERIES, m=64, n=64, warps=8, stages=1),
    _a100(64, 64, kinds=_KEYS, m=64, n=128, warps=8, stages=2),
    _a100(128, 128, kinds=_KEYS, m=32, n=128, warps=8, stages=2),
    _a100(256, 256, kinds=_KEYS, m=32, n=64, warps=8, stages=1),
    _a100(64, 64, kinds=_QUERIES, m=128, n=64, warps=8, stages=2),
    _a100(128, 128, kinds=_QUERIES, m=128, n=32, warps=8, stages=2),
    _a100(256, 256, kinds=_QUERIES, m=64, n=32, warps=8, stages=1),
    _small(64, 64, kinds=_KEYS, m=64, n=64, warps=4, stages=2),
    _small(128, 128, kinds=_KEYS, m=32, n=64, warps=4, stages=1),
    _small(256, 256, kinds=_KEYS, m=16, n=64, warps=8, stages=1),
    _small(64, 64, kinds=_QUERIES, m=64, n=64, warps=4, stages=2),
    _small(128, 128, kinds=_QUERIES, m=64, n=32, warps=4, stages=1),
    _small(256, 256, kinds=_QUERIES, m=64, n=16, warps=8, stages=1),
)

_other = functools.partial(Row, 256, 256, targets=frozenset(), source="no row of the tile table lists the target")
TRIED: tuple[Row, ...] = tuple(
    _other(m=m, n=n, warps=warps, stages=stages)
    for m, n, warps, stages in ((64, 32, 4, 1), (64, 64, 4, 1), (128, 32, 4, 1), (128, 64, 4, 1), (128, 64, 8, 2)))

TILES = TileTable(
    _ROWS, overrides=(), kinds=KINDS, tried=TRIED,
    kind_of=lambda spec: "whole" if spec.kernel in (None, "preprocess") else str(spec.kernel),
    axes={"m": (64, 128, 256), "n": (32, 64, 128, 256), "warps": (4, 8), "stages": (2, 3, 4, 5)})
