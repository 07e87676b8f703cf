"""Slots: the places in a skeleton that a file choice fills. templates/slots/<slot>/<choice>.cuh.j2 for every row here.

A slot's contract is the set of device functions its files define:
  layout  struct Work, Work locate_work(p, tile), and the first rows of its tensors: q_rows, k_rows, v_rows, out_rows,
          lse_offset, each of (p, work)
  mask    KeyRange visible_keys(p, q_pos, seqlen_q, seqlen_kv), an interval that never moves left as q_pos grows;
          bool sees(keys, kv_pos), of that interval and a position, both counted from the same place
          (expression) int tile_class(p, work, first_row, last_row, tile), what of a tile the rows see;
          void hide_scores(s, p, work, row, kv_pos); RowSight and holds(sight, kv_pos), for single keys
  score   void modify_scores(s, p, head_q, q_pos, kv_pos)
          (expression) void change_scores(s, p, work, row, kv_pos)
  order   (persistent grids) int next_unit(p, unit), known to lane 0, and int ordered_tile(p, tile): which comes when
  cache   (flashmla) CacheRow cache_row(p, request, key): the page of a key and its row in it
  copy    (flashmla) struct CacheCopy, which copies tiles of keys: find, start and flush, by each of COPY_WARPS warps
  rows    (fa3) what the rows of query tiles are: group_queries(p) of a warpgroup, rows_per_query(p); of row r
          query_of_row(p, r), out_row and lse_place(p, work, r); load_query_rows(p, tile, barrier, work, first query)
  coordinates  (tensor maps) map_q_row, map_kv_row, map_batch, each of (work)
"""
from __future__ import annotations

from dataclasses import dataclass

from flashgen.codegen.plan import Param


@dataclass(frozen=True)
class KvLoop:
    """One of the loops over KV tiles. fa2 goes from the last tile to the first, fa3 from the first to the last."""

    about: str
    until: str    # where this loop ends: fa2, a member of KvTiles; fa3, an expression
    masked: bool
    masked_where: str = ""  # fa3: only there
    exact: bool = False    # fa3: a row may meet its first key, and then true maxima are taken
    stale: bool = True     # fa3: they are not
    settles: bool = False  # fa3: by now every row has met its first key, if it ever does
    leaves: bool = False   # fa3: what comes before and after the whole tiles, and may have been the end


_RIGHT_ABOUT = "tiles that the mask cuts on the right: masked"
_TAIL_ABOUT = "the tile that the end of the keys cuts: masked"
_WHOLE_ABOUT = "tiles that every row sees whole"
_TAIL = KvLoop(_TAIL_ABOUT, "full_end", True)
_RIGHT = KvLoop(_RIGHT_ABOUT, "full_end", True)
_WHOLE = KvLoop(_WHOLE_ABOUT, "full_begin", False)
_LEFT = KvLoop("tiles that the window cuts on the left: masked", "begin", True)

_UP_WHOLE = KvLoop(_WHOLE_ABOUT, "min_int(tiles.full_end, tiles.end)", False, settles=True)
_UP_RIGHT = KvLoop(_RIGHT_ABOUT, "tiles.end", True)
_UP_TAIL = KvLoop(_TAIL_ABOUT, "tiles.end", True)
# Instead of one for whole tiles and one for the others, where that takes the compiler too long (flag one_loop).
ONE_LOOP = (KvLoop("all tiles, masked from where the mask cuts", "tiles.end", False,
                   masked_where="tile >= tiles.full_end", settles=True),)
# Both ends of a mask that cuts on two sides: one text less to compile (a fifth of the kernel).
_UP_SIDES = KvLoop("tiles that the mask cuts, or in which a row may meet its first key: masked", "masked_end", True,
                   exact=True, stale=False, leaves=True)


@dataclass(frozen=True)
class MaskChoice:
    loops: dict[str, tuple[KvLoop, ...]]  # by family
    params: tuple[Param, ...]


_ALIGN = Param("align_bottom_right", "i32", "1: the last query is aligned with the last key; 0: first with first")

MASKS: dict[str, MaskChoice] = {
    "full": MaskChoice({"fa2": (_TAIL, _WHOLE), "fa3": (_UP_WHOLE, _UP_TAIL)}, ()),
    "causal": MaskChoice({"fa2": (_RIGHT, _WHOLE), "fa3": (_UP_WHOLE, _UP_RIGHT)}, (_ALIGN,)),
    "window": MaskChoice(
        {"fa2": (_RIGHT, _WHOLE, _LEFT), "fa3": (_UP_SIDES, _UP_WHOLE)},
        (
            _ALIGN,
            Param("window_left", "i32", "keys visible before the diagonal, at most max(seqlen_q, seqlen_kv)"),
            Param("window_right", "i32", "keys visible after the diagonal, likewise"),
        ),
    ),
    "interval": MaskChoice({"fa2": (_RIGHT, _WHOLE, _LEFT), "fa3": (_UP_SIDES, _UP_WHOLE)}, (_ALIGN,)),
    "expression": MaskChoice({"fa2": (), "fa3": ()}, (_ALIGN,)),  # tiles are found by class, not by bounds
}

LAYOUTS: dict[str, tuple[Param, ...]] = {
    "dense": (),
    "varlen": (
        Param("cu_seqlens_q", "i32_ptr", "[batch + 1], prefix sums of query lengths"),
        Param("cu_seqlens_kv", "i32_ptr", "[batch + 1], prefix sums of key lengths"),
    ),
}

SCORES: dict[str, tuple[Param, ...]] = {
    "none": (),
    "expression": (Param("softmax_scale", "f32", "of scores, before the expression"), _ALIGN),
}

# What only variants with expressions have, and the name of the opposite: flags of the skeletons.
EXPRESSION_FLAGS = {
    "changed": "unchanged",  # scores, by an expression
    "walked": "ranged",      # tiles of keys are found by class; or they are ranges
    "summed": "normalized",  # weights are the scores themselves; or a softmax
    "sink": "",
    "bounded": "",           # keys by an expression, which is an interval
    "names_batch": "",       # an expression asks which sequence it is
}

ORDERS: dict[str, tuple[Param, ...]] = {
    "in_order": (),
    "longest_first": (Param("heads_per_section", "divisor", "query heads whose keys and values L2 holds together"),
                      Param("heads_before_the_end", "i32", "in whole sections"),
                      Param("heads_at_the_end", "divisor", "in the last section")),
}

WEIGHTS = ("registers", "shared")  # where the A operand of the value product is

ROWS: dict[str, tuple[Param, ...]] = {
    "plain": (),
    "packed": (Param("num_heads_kv", "divisor", "heads of keys and values"),
               Param("group_queries", "divisor", "of a warpgroup: as many as fit into 64 rows, with all heads")),
}

SLOTS: dict[str, tuple[str, ...]] = {"layout": (*LAYOUTS, "packed"), "rows": tuple(ROWS), "score": tuple(SCORES),
                                     "mask": tuple(MASKS), "order": tuple(ORDERS), "coordinates": tuple(LAYOUTS),
                                     "weights": WEIGHTS,
                                     "cache": ("dense", "pages"), "copy": ("boxes", "rows")}


def mask_choice(causal: bool, window: bool) -> str:
    return "window" if window else "causal" if causal else "full"


def tiled_as(mask: str) -> str:
    """The mask whose row of the tile table serves this one."""
    return "window" if mask in ("interval", "expression") else mask
