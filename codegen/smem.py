"""Shared-memory maps: the arithmetic behind TileShape (templates/include/flashgen/tile.cuh)."""
from __future__ import annotations

from flashgen.codegen.plan import Region

ELEMENT_BYTES = 2
SMALL_ALIGN_BYTES = 16
REGION_ALIGN_BYTES = 1024  # eight 128-byte rows: one period of the swizzle


def round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


def smem_cols(head_dim: int) -> int:
    """Columns a row of `head_dim` occupies: whole panels of 32 (64 where that adds none); the copies zero the rest."""
    return round_up(head_dim, 32)


def panel_cols(head_dim: int) -> int:
    """Columns of a panel: 64, or 32 where the head dim asks for it."""
    return 64 if smem_cols(head_dim) % 64 == 0 else 32


def tile_bytes(rows: int, head_dim: int) -> int:
    return rows * smem_cols(head_dim) * ELEMENT_BYTES


def layout_regions(pieces: tuple[tuple[str, int, str], ...]) -> tuple[Region, ...]:
    """Places (name, bytes, what it holds) one after the other. What is smaller than a period of the swizzle is no tile.
    """
    regions, offset = [], 0
    for name, size, holds in pieces:
        offset = round_up(offset, REGION_ALIGN_BYTES if size >= REGION_ALIGN_BYTES else SMALL_ALIGN_BYTES)
        regions.append(Region(name, offset, size, holds))
        offset += size
    return tuple(regions)


def end_of(regions: tuple[Region, ...]) -> int:
    """The bytes that a block asks for."""
    return regions[-1].offset_bytes + regions[-1].size_bytes if regions else 0
