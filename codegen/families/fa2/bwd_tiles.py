"""Tiles of the backward of fa2: `n` keys of a block, which meet `m` queries at a time.

`key_warps` of the warps divide the keys; the others repeat them for further queries, and for further columns of dK and
dV. No row was timed, except where its source says so.
"""
from __future__ import annotations

import functools

from flashgen.codegen.families.fa2.tiles import A100, B200, HOPPER, SMALL_SMEM
from flashgen.codegen.families.shared.backward_warps import BwdTileRow
from flashgen.codegen.families.shared.tiles import TileTable

_hopper = functools.partial(BwdTileRow, targets=HOPPER, source=(
    "the largest tile that 255 registers and 227 KiB of shared memory hold; not timed"))
_b200 = functools.partial(BwdTileRow, targets=B200, source=(
    "the sm_90 tile, narrower where registers run out; not timed"))
_a100 = functools.partial(BwdTileRow, targets=A100, source=(
    "the sm_90 tile shrunk to 164 KiB of shared memory per SM; not timed"))
_small = functools.partial(BwdTileRow, targets=SMALL_SMEM, source=(
    "the sm_90 tile shrunk to 100 KiB of shared memory per SM; not timed"))

# Of specs whose score reads tensors and has a slope: a thread holds scores as they were, slopes and dS at once.
SLOPES = "slopes"
_slopes = frozenset({SLOPES})

_ROWS: tuple[BwdTileRow, ...] = (
    _hopper(64, 64, m=64, n=128, warps=8, key_warps=4, stages=2, kinds=_slopes),
    _a100(64, 64, m=64, n=128, warps=8, key_warps=4, stages=2, kinds=_slopes),
    _hopper(32, 32, m=128, n=128, warps=8, key_warps=4, stages=2),
    _hopper(64, 64, m=128, n=128, warps=8, key_warps=4, stages=2),
    _hopper(96, 96, m=64, n=128, warps=8, key_warps=4, stages=2),
    _hopper(128, 128, m=64, n=128, warps=8, key_warps=4, stages=2),
    _hopper(192, 128, m=64, n=96, warps=8, key_warps=2, stages=2),
    _hopper(192, 192, m=64, n=64, warps=8, key_warps=2, stages=2),
    _hopper(224, 224, m=64, n=64, warps=8, key_warps=2, stages=2, dq_passes=2, register_usage_level=10),
    _hopper(248, 248, m=64, n=32, warps=8, key_warps=2, stages=2),  # with 64 keys windows spill
    _hopper(256, 256, m=64, n=64, warps=8, key_warps=2, stages=2, dq_passes=2, register_usage_level=10),
    _b200(32, 32, m=128, n=128, warps=8, key_warps=4, stages=2),
    _b200(96, 96, m=64, n=128, warps=8, key_warps=4, stages=2),
    _b200(192, 128, m=64, n=96, warps=8, key_warps=2, stages=2),
    _b200(192, 192, m=64, n=64, warps=8, key_warps=2, stages=2),
    _b200(256, 256, m=64, n=32, warps=8, key_warps=2, stages=2),
    _a100(32, 32, m=128, n=128, warps=8, key_warps=4, stages=2),
    _a100(64, 64, m=128, n=128, warps=8, key_warps=4, stages=1),
    _a100(96, 96, m=64, n=128, warps=8, key_warps=4, stages=2),
    _a100(128, 128, m=64, n=128, warps=8, key_warps=4, stages=2, register_usage_level=2),
    _a100(192, 192, m=64, n=64, warps=8, key_warps=2, stages=2),
    _a100(256, 256, m=64, n=64, warps=8, key_warps=2, stages=1, dq_passes=2),
    _small(32, 32, m=64, n=128, warps=8, key_warps=4, stages=2),
    _small(64, 64, m=64, n=128, warps=8, key_warps=4, stages=2),
    _small(96, 96, m=64, n=64, warps=8, key_warps=2, stages=2),
    _small(128, 128, m=64, n=64, warps=8, key_warps=2, stages=1),
    _small(224, 224, m=64, n=32, warps=8, key_warps=2, stages=1),
    _small(256, 256, m=64, n=16, warps=4, key_warps=1, stages=1),
)

BWD_TILES = TileTable(_ROWS, overrides=(), axes={})
