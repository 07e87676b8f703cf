"""How an fa3 launch cuts query tiles along their keys, and in which order it takes heads. No torch, no CUDA.

A change here that gives other values for the same plan is a change of bundle.LAUNCH_RULES.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from flashgen.codegen.smem import round_up
from flashgen.codegen.warpgroup import WARPGROUP_ROWS
from flashgen.errors import UnsupportedError

MAX_PARTS = 128             # of the keys of one query tile
MAX_ROUNDS = 4              # of parts over all SMs: more never paid
# What splitting costs, in the time that a query tile spends on one key: of each round of parts, of waiting for the last
# ones, and how many bytes of parts are written and read back meanwhile, for each column of the output (a key takes
# longer with more of them). Fitted to forced numbers of parts timed on an H200: within 2 % of the best (docs/fa3.md).
ROUND_KEYS, MERGE_KEYS, BYTES_PER_KEY = 192, 256, 512
PACKING_GAIN = 0.75         # of the rows multiplied: with more of them left, packing is not worth its slower stores
# Key tiles as wide as that, which only kernels that split have, pay from so many keys on, split or not (docs/fa3.md).
WIDE_TILE, WIDE_KEYS = 128, 4096
SPLIT_GAIN = 0.012          # docs/fa3.md: predicted gains below it were losses
SECTION_HEADS = 16          # docs/fa3.md: 8 to 32 are as good, all heads at once cost up to a fifth
SECTION_BYTES = 32 << 20    # of K and V that L2 keeps beside what else passes through it
LAST_ROUNDS = 3             # of query tiles over all SMs, sorted by length at the end of the grid


class Cutting(NamedTuple):
    """What of a kernel decides how its tiles are cut and ordered."""

    rows: int  # of a query tile
    keys: int  # of a tile of keys
    causal: bool
    packed: bool
    head_dim_qk: int
    head_dim_v: int
    element_bytes: int
    walked: bool = False  # which tiles of keys count depends on data

    def queries(self, group: int) -> int:
        """Of a tile, where `group` query heads share a kv head. UnsupportedError if those exceed a warpgroup's rows."""
        if not self.packed:
            return self.rows
        if group > WARPGROUP_ROWS:
            raise UnsupportedError(f"{group} query heads for each kv head", where="pack_gqa",
                                   allowed=f"at most {WARPGROUP_ROWS}", nearest="a kernel without pack_gqa")
        return self.rows // WARPGROUP_ROWS * (WARPGROUP_ROWS // group)

    @property
    def part_row_bytes(self) -> int:
        """Of device memory, for one row of a part: merge.cuh."""
        return 4 * round_up(self.head_dim_v, 16) + 32


class Parts(NamedTuple):
    """How the tiles after the first `full_tiles` are cut along their keys: parameters of the kernel."""

    full_tiles: int
    tiles_per_part: int  # tiles of keys
    max_parts: int       # of one query tile
    num_units: int       # full tiles and parts

    @classmethod
    def none(cls, num_tiles: int) -> Parts:
        return cls(num_tiles, 1, 1, num_tiles)


def cut_tail(cut: Cutting, num_sms: int, *, batch: int, seqlen_q: int, seqlen_kv: int, num_heads_q: int,
             num_heads_kv: int, top_left: bool = False, **_: Any) -> Parts:
    """The parts of a dense call; arguments as values.launch_values takes them."""
    queries = cut.queries(num_heads_q // num_heads_kv)
    m_tiles = -(-seqlen_q // queries)
    tiles = m_tiles * (num_heads_kv if cut.packed else num_heads_q) * batch
    left = tiles % num_sms
    if cut.causal and not cut.packed:
        # Blocks draw tickets, long tiles first, and end together without parts, unless tiles are few or equally long.
        if tiles >= num_sms and seqlen_kv < 2 * seqlen_q:
            return Parts.none(tiles)
        # The last tiles of slots/order/longest_first.cuh.j2, whose last section is longer.
        heads = sections(cut, num_sms, num_heads_q * batch, m_tiles, seqlen_kv,
                         num_heads_q // num_heads_kv)["heads_at_the_end"]
        places = [(heads * m_tiles - left + i) // heads for i in range(left)]
    else:
        places = [(tiles - left + i) % m_tiles for i in range(left)]
    lengths = Counter[int]()
    for place, count in Counter(places).items():
        # Tiles end with the last group of queries (first_group in templates/fa3/units.cuh.j2).
        last_row = min(round_up(seqlen_q, queries * WARPGROUP_ROWS // cut.rows) - place * queries, seqlen_q) - 1
        last_key = last_row + (0 if top_left else seqlen_kv - seqlen_q) if cut.causal else seqlen_kv
        # As num_parts in templates/fa3/unit_tiles.cuh.j2 counts them.
        lengths[max(min(last_key, seqlen_kv - 1), 0) // cut.keys + 1] += count
    rows = min(seqlen_q, queries) * (num_heads_q // num_heads_kv if cut.packed else 1)
    return split_tail(tiles, lengths, num_sms, rows * cut.part_row_bytes, cut.keys, cut.head_dim_v)


def best_twin(cut: Cutting, packed: Cutting, num_sms: int, **call: Any) -> tuple[bool, bool | None]:
    """Whether a dense call had better be served by a kernel that can cut its last tiles, because it does or because its
    key tiles are wide, and by one that packs the query heads of a kv head into its tiles; None where none can. `cut`
    and `packed`: of the two that can cut. Other arguments as values.launch_values takes them.

    Packing must spare rows that are multiplied for nothing, and not have keys read more often. Long sequences have as
    many rows packed or not, and unpacked ones are stored faster.
    """
    seqlen_q, group = call["seqlen_q"], call["num_heads_q"] // call["num_heads_kv"]
    packs = None
    if group <= WARPGROUP_ROWS:
        tiles, others = -(-seqlen_q // packed.queries(group)), group * -(-seqlen_q // cut.rows)
        packs = tiles <= others and packed.rows * tiles <= PACKING_GAIN * cut.rows * others
    wide = cut.keys >= WIDE_TILE and call["seqlen_kv"] >= WIDE_KEYS
    return wide or cut_tail(packed if packs else cut, num_sms, **call).max_parts > 1, packs


def split_tail(num_tiles: int, lengths: Mapping[int, int], num_sms: int, part_bytes: int, keys: int = 64,
               head_dim_v: int = 128) -> Parts:
    """How to cut the tiles of the last, incomplete round. `lengths`: how many of them have so many tiles of keys.

    Whole rounds of num_sms tiles keep every SM busy. The remainder would leave SMs idle in a last round of its own, so
    its tiles are cut along the keys into parts, which take less time. A kernel that splits is itself a little slower,
    so less than SPLIT_GAIN of the whole is no reason to. `part_bytes`: of device memory, for the rows that exist;
    `keys`: of a tile.
    """
    rest, longest = sum(lengths.values()), max(lengths, default=1)
    best, least = Parts.none(num_tiles), float(longest * keys + ROUND_KEYS)
    enough = least - SPLIT_GAIN * -(-num_tiles // num_sms) * longest * keys
    for count in range(2, min(MAX_PARTS, longest) + 1):
        size = -(-longest // count)
        parts = sum(tiles * -(-length // size) for length, tiles in lengths.items())
        rounds = -(-parts // num_sms)
        cost = rounds * (size * keys + ROUND_KEYS) + MERGE_KEYS + parts * part_bytes / (BYTES_PER_KEY * head_dim_v)
        if cost < min(enough, 0.98 * least if best.max_parts > 1 else least):  # of those about as good, the fewest
            best, least = Parts(num_tiles - rest, size, -(-longest // size), num_tiles - rest + parts), cost
        if rounds > MAX_ROUNDS:
            break
    return best


def sections(cut: Cutting, num_sms: int, heads: int, m_tiles: int, seqlen_kv: int, heads_per_kv_head: int
             ) -> dict[str, int]:
    """How slots/order/longest_first.cuh.j2 goes through query heads: those of all sequences; of a varlen call, those of
    all sequences as one, with seqlen_kv keys.

    heads_per_section: as many as read SECTION_BYTES of K and V together, so that L2 keeps them while the query tiles of
    a section are worked on; at least 1, at most SECTION_HEADS. heads_at_the_end: enough for LAST_ROUNDS rounds of all
    SMs, whose tiles end in order of length. heads_before_the_end: the others, in whole sections. Where data decide
    which keys a query tile reads, nobody knows how many bytes that will be, and SECTION_HEADS even out its length.
    """
    key_bytes = 0 if cut.walked else seqlen_kv * (cut.head_dim_qk + cut.head_dim_v) * cut.element_bytes
    per_section = max(1, min(SECTION_HEADS, heads, SECTION_BYTES * heads_per_kv_head // max(key_bytes, 1)))
    at_the_end = min(heads, -(-LAST_ROUNDS * num_sms // max(m_tiles, 1)))
    before = (heads - at_the_end) // per_section * per_section
    return {"heads_per_section": per_section, "heads_before_the_end": before, "heads_at_the_end": heads - before}
