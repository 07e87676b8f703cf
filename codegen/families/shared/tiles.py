"""Tile tables: which tile a head size gets on which target, and who measured it. Each family has its own.

A row serves head sizes up to its own (a smaller head uses the next larger row); rows are tried in order, and the first
that covers the head and lists the target wins.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from flashgen.codegen.spec.spec import Spec

ANY = frozenset({"full", "causal", "window"})
FULL = frozenset({"full"})
CAUSAL = frozenset({"causal"})
WHOLE = frozenset({"whole"})
KEYS = tuple(range(32, 257, 16))  # keys per tile that tune tries
STAGES = (2, 3, 4, 5)             # stages that tune tries


@dataclass(frozen=True)
class Row:
    """The fields that all tables have. A family adds its own."""

    head_dim_qk: int
    head_dim_v: int
    _: KW_ONLY
    targets: frozenset[str]
    masks: frozenset[str] = ANY
    kinds: frozenset[str] = WHOLE  # kinds of kernel that the row is for, of TileTable.kinds
    m: int                         # query rows per block
    n: int                         # keys per tile
    warps: int
    stages: int
    register_usage_level: int | None = None  # ptxas option, 0 to 10; None is its default, 5
    source: str


_Row = TypeVar("_Row", bound=Row)
_COMMON = ("m", "n", "warps", "stages")


@dataclass(frozen=True)
class TileTable(Generic[_Row]):
    rows: tuple[_Row, ...]
    axes: Mapping[str, tuple[Any, ...]]            # values that tune tries, by field of the row or of the spec
    overrides: tuple[str, ...]                     # fields of a row that specs set, beside tile, roles and stages
    kinds: tuple[str, ...] = ("whole",)
    kind_of: Callable[[Any], str] = lambda spec: "whole"
    rows_per_warp: int = 0                         # query rows that go with each warp; 0: set apart
    tried: tuple[_Row, ...] = ()                   # what the first call times where no row fits

    @property
    def own(self) -> tuple[str, ...]:
        """The axes that only specs of this family have."""
        return tuple(name for name in self.axes if name not in _COMMON)

    def find(self, target: str, mask: str, head_dim_qk: int, head_dim_v: int, kind: str = "whole") -> _Row | None:
        """The first row that lists the target, mask and kind of kernel and covers the head; None where no row does."""
        return next((row for row in self.rows if target in row.targets and mask in row.masks and kind in row.kinds
                     and head_dim_qk <= row.head_dim_qk and head_dim_v <= row.head_dim_v), None)

    def serves(self, target: str, mask: str, head_dim_qk: int, head_dim_v: int) -> bool:
        """Whether a kernel without a tile of its own gets one."""
        return bool(self.tried) or self.find(target, mask, head_dim_qk, head_dim_v) is not None

    def overridden(self, spec: Spec, row: _Row) -> _Row:
        """The table's row with the spec's explicit overrides in place."""
        changes: dict[str, Any] = {}
        if spec.tile is not None:
            changes |= {"m": spec.tile.m, "n": spec.tile.n}
        if spec.roles is not None:
            changes["warps"] = spec.roles.mma
        if self.rows_per_warp and spec.tile is not None and spec.roles is None:
            changes["warps"] = spec.tile.m // self.rows_per_warp
        if self.rows_per_warp and spec.roles is not None and spec.tile is None:
            changes["m"] = spec.roles.mma * self.rows_per_warp
        changes |= {name: value for name in ("stages", *self.overrides)
                    if (value := getattr(spec, name)) is not None}
        if changes:
            changes["source"] = "overridden in the spec: " + ", ".join(f"{k} {v}" for k, v in changes.items())
        return replace(row, **changes)
