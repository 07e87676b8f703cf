"""Slots: the places in a skeleton that a file choice fills. templates/slots/<slot>/<choice>.cuh.j2 for every row here.

A slot's contract is the set of device functions its files define:
  layout  struct TileCoord, TileCoord tile_coord(p, tile), and the first rows of its tensors: v_rows, out_rows and
          lse_offset, each of (p, work); `inputs` (fa2) has q_rows and k_rows
  mask    KeyRange visible_keys(p, q_pos, seqlen_q, seqlen_kv), an interval that never moves left as q_pos grows;
          bool sees(keys, kv_pos), of that interval and a position, both counted from the same place
          (expression) int tile_class(p, work, first_row, last_row, tile), what of a tile the rows see;
          void mask_by_key(s, p, work, row, kv_pos); RowSight and holds(sight, kv_pos), for single keys
  score   (expression) ScoreParts score_parts(p, work, row), void score_mod(s, p, work, parts, kv_pos)
  order   (persistent grids) int next_work_idx(p, work_idx), known to lane 0; int ordered_tile(p, tile): tiles in order
  cache   (flashmla) CacheRow cache_row(p, request, key): the page of a key and its row in it
  copy    (flashmla) struct CacheCopy, which copies tiles of keys: find, start and flush, by each of COPY_WARPS warps
  rows    (fa3) what the rows of query tiles are: queries_per_warpgroup(p); rows_from(p, work, row), those that
          exist; of row r out_row and lse_place(p, work, r); load_query_rows(p, tile, barrier, work, first query)
  queries  (keys in the outer loop) QueryRange seeing_queries(p, kv_pos, seqlen_q, seqlen_kv), the reverse of `mask`:
          the queries that see a key, an interval that never moves left as kv_pos grows
  key_mask (backward) int tile_class(p, work, head_q, first, last), what queries of these tiles see of the block's keys;
          bool sees(p, work, head_q, kv_pos, query)
  score_slope (backward) score_mod(s, slopes, p, work, head_q, kv_pos, query): the expression and its derivative
          void add_parameter_gradients(ds, scores, p, work, head_q, kv_pos, query), of tensors that it reads
  turns    (backward, where blocks take turns) int seen_keys_end(p, q_pos, seqlen_q, seqlen_kv): where the keys end that
          a query sees; never falls as q_pos grows
  row_tile (backward) RowTile row_tile(p, tile, head_q): the rows of a query tile of the kernels around the gradients
  row_terms (backward) put_row_terms(p, place, lse, neg_delta): what preprocess leaves of a row for the gradients
  dq_order (backward) read_fragments(x, group): how elements of a fragment lie in dq_accum
  key_layout (backward) KeyTileCoord key_tile_coord(p, tile, head); dk_rows and dv_rows, each of (p, work), the first
          rows of its results; `key_inputs` (where threads copy) has q_rows and dout_rows, each of (p, work, head_q),
          and k_rows and v_rows
  first_row (dropout) uint32_t first_row(p, work): the place of a sequence's first query among those of all sequences
  coordinates  (tensor maps) map_q_row, map_kv_row, map_batch, each of (work)
"""
from __future__ import annotations

from flashgen.codegen.plan import Param

_ALIGN = Param("align_bottom_right", "i32", "1: the last query is aligned with the last key; 0: first with first")

MASKS: dict[str, tuple[Param, ...]] = {
    "full": (),
    "causal": (_ALIGN,),
    "window": (
        _ALIGN,
        Param("window_left", "i32", "keys visible before the diagonal, at most max(seqlen_q, seqlen_kv)"),
        Param("window_right", "i32", "keys visible after the diagonal, likewise"),
    ),
    "interval": (_ALIGN,),
    "expression": (_ALIGN,),
}

LAYOUTS: dict[str, tuple[Param, ...]] = {
    "dense": (),
    "varlen": (
        Param("cu_seqlens_q", "i32_ptr", "[batch + 1], prefix sums of query lengths"),
        Param("cu_seqlens_kv", "i32_ptr", "[batch + 1], prefix sums of key lengths"),
    ),
}

SCORES: dict[str, tuple[Param, ...]] = {  # a spec without a score expression has no such slot
    "expression": (Param("softmax_scale", "f32", "of scores, before the expression"), _ALIGN),
}

EXPRESSION_FLAGS = (  # flags of the skeletons that only plans with expressions list
    "score_mod",
    "evaluates",    # an expression is printed: expression.cuh
    "sink",
    "names_batch",  # an expression asks which sequence it is
    "parameter_gradients",  # backward: of tensors that the score reads
)

RARE_FLAGS = (*EXPRESSION_FLAGS, "dropout")  # false where a plan does not list them
RARE_CHOICES = {"dropout": "none"}            # of slots that a plan need not list

ORDERS: dict[str, tuple[Param, ...]] = {
    "in_order": (),
    "longest_first": (Param("heads_per_section", "divisor", "query heads whose keys and values L2 holds together"),
                      Param("heads_before_the_end", "i32", "in whole sections"),
                      Param("heads_at_the_end", "divisor", "in the last section")),
}

P_OPERANDS = ("registers", "shared")  # where P, the A operand of the PV product, is

ROWS: dict[str, tuple[Param, ...]] = {
    "plain": (),
    "pack_gqa": (Param("num_heads_kv", "divisor", "heads of keys and values"),
               Param("queries_per_warpgroup", "divisor", "as many as fit into 64 rows, with all heads")),
}

SLOTS: dict[str, tuple[str, ...]] = {
    "layout": (*LAYOUTS, "pack_gqa"), "inputs": tuple(LAYOUTS), "rows": tuple(ROWS), "score": tuple(SCORES),
    "mask": tuple(MASKS), "order": tuple(ORDERS), "coordinates": tuple(LAYOUTS), "p_operand": P_OPERANDS,
    "queries": ("full", "causal", "window"), "turns": ("full", "causal", "window"), "row_tile": tuple(LAYOUTS),
    "dq_order": ("vector", "component"), "row_terms": ("numbers", "operand"),
    "key_layout": tuple(LAYOUTS), "key_inputs": tuple(LAYOUTS),
    "key_mask": ("expression",), "score_slope": tuple(SCORES), "first_row": tuple(LAYOUTS),
    "cache": ("dense", "pages"), "copy": ("boxes", "rows"),
}

# Slots inside the bodies of a family's kernels: templates/<family>/<slot>/<choice>/<piece>.cuh.j2, each piece included
# by name (`walk.loads`). All choices of a slot have the same pieces.
PIECES: dict[str, tuple[str, ...]] = {
    "walk": ("ranges", "classes"),        # tiles of keys are a range, or are found by their class
    "loops": ("in_turn", "alternating"),  # fa3, ranges: loops run in turn, or one before and after the other; by mask
    "normalize": ("softmax", "none"),     # P is a softmax, or the scores themselves
    "output": ("apart", "over_queries"),  # fa3: the output waits in room of its own, or in that of its queries
    "work": ("whole", "split"),           # fa3: a work tile is a query tile, or may be a split of one
    "query": ("registers", "shared"),     # fa2: where the A operand of the QK product is
    "slopes": ("times_p", "times_ds", "times_ds_alone"),  # fa2, backward: what is multiplied by the score's slope
    "steps": ("ranges", "classes"),       # fa2, backward: tiles of queries are a range, or are found by their class
    "p_precision": ("fp32", "element"),   # fa3, backward, wide heads: of the P that dS is made of
    "positions": tuple(LAYOUTS),          # triton: where a block stands, and its tensors
    "visible": ("full", "causal", "window", "expression"),  # triton: the mask, and loops over what it lets through
    "dropout": ("none", "philox"),        # fa2, backward: all of P is multiplied with dO, or what dropout keeps
}


def mask_choice(causal: bool, window: bool) -> str:
    return "window" if window else "causal" if causal else "full"


def tiled_as(mask: str) -> str:
    """The mask whose row of the tile table serves this one."""
    return "window" if mask in ("interval", "expression") else mask
