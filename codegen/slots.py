"""Slots: the places in a skeleton that a file choice fills. templates/slots/<slot>/<choice>.cuh.j2 for every row here.

A slot's contract is the set of device functions its files define:
  layout  struct Work, Work locate_work(p), and the first rows of its tensors: q_rows, k_rows, v_rows, out_rows,
          lse_offset, each of (p, work)
  mask    KeyRange visible_keys(p, q_pos, seqlen_q, seqlen_kv), an interval that never moves left as q_pos grows
  score   void modify_scores(s, p, head_q, q_pos, kv_pos)
"""
from __future__ import annotations

from dataclasses import dataclass

from flashgen.codegen.plan import Param


@dataclass(frozen=True)
class KvLoop:
    """One of the loops over KV tiles, which run from the last tile to the first."""

    about: str
    until: str    # member of KvTiles: the lowest tile of this loop
    masked: bool


_TAIL = KvLoop("the tile that the end of the keys cuts: masked", "full_end", True)
_RIGHT = KvLoop("tiles that the mask cuts on the right: masked", "full_end", True)
_WHOLE = KvLoop("tiles that every row sees whole", "full_begin", False)
_LEFT = KvLoop("tiles that the window cuts on the left: masked", "begin", True)


@dataclass(frozen=True)
class MaskChoice:
    loops: tuple[KvLoop, ...]
    params: tuple[Param, ...]


_ALIGN = Param("align_bottom_right", "i32", "1: the last query is aligned with the last key; 0: first with first")

MASKS: dict[str, MaskChoice] = {
    "full": MaskChoice((_TAIL, _WHOLE), ()),
    "causal": MaskChoice((_RIGHT, _WHOLE), (_ALIGN,)),
    "window": MaskChoice(
        (_RIGHT, _WHOLE, _LEFT),
        (
            _ALIGN,
            Param("window_left", "i32", "keys visible before the diagonal, at most max(seqlen_q, seqlen_kv)"),
            Param("window_right", "i32", "keys visible after the diagonal, likewise"),
        ),
    ),
}

LAYOUTS: dict[str, tuple[Param, ...]] = {
    "dense": (),
    "varlen": (
        Param("cu_seqlens_q", "i32_ptr", "[batch + 1], prefix sums of query lengths"),
        Param("cu_seqlens_kv", "i32_ptr", "[batch + 1], prefix sums of key lengths"),
    ),
}

SCORES: dict[str, tuple[Param, ...]] = {"none": ()}

SLOTS: dict[str, tuple[str, ...]] = {"layout": tuple(LAYOUTS), "score": tuple(SCORES), "mask": tuple(MASKS)}


def mask_choice(causal: bool, window: bool) -> str:
    return "window" if window else "causal" if causal else "full"
