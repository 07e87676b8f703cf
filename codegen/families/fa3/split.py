"""How an fa3 launch cuts query tiles along their keys, how many rows they have, and in which order it takes heads. No
torch, no CUDA.

A change here that gives other values for the same plan is a change of bundle.LAUNCH_RULES.
"""
from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from flashgen.codegen.families.shared.launch import Sizes
from flashgen.codegen.smem import round_up
from flashgen.codegen.warpgroup import WARPGROUP_ROWS
from flashgen.errors import UnsupportedError

MAX_PARTS = 128             # of the keys of one query tile
MAX_ROUNDS = 4              # of parts over all SMs: more never paid
PACKING_GAIN = 0.75         # of the rows multiplied: with more of them left, packing is not worth its slower stores
# Only kernels that split have key tiles this wide. They pay from this many keys on, split or not (docs/lab/fa3.md).
WIDE_TILE, WIDE_KEYS = 128, 4096
SPLIT_GAIN = 0.012          # docs/lab/fa3.md: predicted gains below it were losses
MANY_ROUNDS = 4             # of the tallest tiles over all SMs: from there on, less tall ones only cost
# Four costs in SM cycles, fitted to every number of warpgroups and parts of 250 calls on an H200 (docs/results/fa3.md):
# prologue and epilogue of a query tile per warpgroup, one more wave, one wait for parts, one byte of parts written and
# read back.
WARPGROUP_CLOCKS, ROUND_CLOCKS, MERGE_CLOCKS, BYTE_CLOCKS = 600, 1600, 4800, 9.5e-4
SPLITTING_COSTS = 1.02      # the time of kernels that can split, even where they do not
SECTION_HEADS = 16          # docs/lab/fa3.md: 8 to 32 are as good, all heads at once cost up to a fifth
SECTION_BYTES = 32 << 20    # of K and V that L2 keeps beside what else passes through it
LAST_ROUNDS = 3             # of query tiles over all SMs, sorted by length at the end of the grid


class Cutting(NamedTuple):
    """What of a kernel, and of a launch of it, decides how its tiles are cut and ordered."""

    rows: int  # of a query tile; of a kernel, at most
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
    def warpgroups(self) -> int:
        return -(-self.rows // WARPGROUP_ROWS)

    @property
    def part_row_bytes(self) -> int:
        """Of device memory, for one row of a part: merge_per_warp.cuh."""
        return 4 * round_up(self.head_dim_v, 16) + 32

    @property
    def step_clocks(self) -> float:
        """What a tile of keys takes: the chain of one warpgroup, products and softmax, or, of many warpgroups, whatever
        is busiest, with a soft edge between the two. Within a tenth of the timed ones (docs/results/fa3.md)."""
        products = 2 * WARPGROUP_ROWS * self.keys * (self.head_dim_qk + self.head_dim_v) / 4096  # FLOP per clock
        exponentials = WARPGROUP_ROWS * self.keys / 16  # per clock
        # What one warpgroup cannot hide: its softmax, and of its products what the softmax waits for. Fitted.
        chain = 230 + 4.6 * self.keys + 0.885 * products
        busiest = (products ** 3 + exponentials ** 3) ** (1 / 3)
        return float(((self.warpgroups * busiest) ** 5 + chain ** 5) ** 0.2)


class Parts(NamedTuple):
    """How the tiles after the first `full_tiles` are cut along their keys: parameters of the kernel."""

    full_tiles: int
    tiles_per_split: int  # key tiles
    max_splits: int       # of one query tile
    num_work_tiles: int   # full tiles and splits

    @classmethod
    def none(cls, num_tiles: int) -> Parts:
        return cls(num_tiles, 1, 1, num_tiles)


class Shape(NamedTuple):
    """Of a dense call, or of one that stands for another: the sizes that count here, as the key of a memo."""

    batch: int
    seqlen_q: int
    seqlen_kv: int
    num_heads_q: int
    num_heads_kv: int
    top_left: bool = False
    window: tuple[int, int] = (-1, -1)

    @classmethod
    def of(cls, sizes: Sizes) -> Shape:
        return cls(*(getattr(sizes, name) for name in cls._fields))


class Grid(NamedTuple):
    """The query tiles of a call."""

    cut: Cutting
    num_sms: int
    m_tiles: int    # of a head and sequence
    heads: int      # of all sequences; packed: of keys
    group: int      # query heads of a kv head
    seqlen_q: int
    seqlen_kv: int
    shift: int      # of the last key that a row sees against the row, causal
    reach: int      # keys that a tile sees, at most

    @classmethod
    def of(cls, cut: Cutting, num_sms: int, shape: Shape) -> Grid:
        group = shape.num_heads_q // shape.num_heads_kv
        queries, keys = cut.queries(group), shape.seqlen_kv
        reach = keys if min(shape.window) < 0 else min(keys, sum(shape.window) + queries + cut.keys)
        return cls(cut, num_sms, -(-shape.seqlen_q // queries),
                   (shape.num_heads_kv if cut.packed else shape.num_heads_q) * shape.batch, group,
                   shape.seqlen_q, keys, 0 if shape.top_left else keys - shape.seqlen_q, reach)

    @property
    def tiles(self) -> int:
        return self.m_tiles * self.heads

    @property
    def rounds(self) -> int:
        return -(-self.tiles // self.num_sms)

    @property
    def part_bytes(self) -> int:
        """Of a part, for the rows that exist."""
        queries = self.cut.queries(self.group)
        return min(self.seqlen_q, queries) * (self.group if self.cut.packed else 1) * self.cut.part_row_bytes

    def length(self, place: int) -> int:
        """Tiles of keys of a tile of queries: number `place` of a head, the longest first. As num_splits in
        templates/fa3/splits.cuh.j2 counts them."""
        last = self.reach
        if self.cut.causal:
            # Tiles end with the last group of queries (first_group in flashgen/query_groups.cuh).
            queries = self.cut.queries(self.group)
            end = round_up(self.seqlen_q, queries // self.cut.warpgroups) - place * queries
            last = min(end, self.seqlen_q) - 1 + self.shift
        return max(min(last, self.seqlen_kv - 1), 0) // self.cut.keys + 1

    def clocks(self) -> float:
        """Of all tiles, beyond what every launch takes. Tiles of different lengths, the longest first, each to the SM
        that is free first, end as well as together: as good a guess as going through them all."""
        longest, shortest = self.length(0), self.length(self.m_tiles - 1)
        busiest = max(longest, self.rounds * shortest, self.tiles * (longest + shortest) / 2 / self.num_sms)
        return (self.cut.warpgroups * WARPGROUP_CLOCKS + busiest * self.cut.step_clocks
                + max(self.rounds - 1, 0) * ROUND_CLOCKS)

    def tail(self) -> dict[int, int]:
        """How many of the tiles of the last, incomplete round have so many tiles of keys; none where they need no
        parts."""
        left = self.tiles % self.num_sms
        if self.cut.causal and not self.cut.packed:
            # Blocks fetch long tiles first and end together without parts, unless tiles are few or equally
            # long.
            if self.tiles >= self.num_sms and self.seqlen_kv < 2 * self.seqlen_q:
                return {}
            # The last tiles of slots/order/longest_first.cuh.j2, whose last section is longer.
            heads = sections(self.cut, self.num_sms, self.heads, self.m_tiles, self.seqlen_kv,
                             self.group)["heads_at_the_end"]
            places = [(heads * self.m_tiles - left + i) // heads for i in range(left)]
        else:
            places = [(self.tiles - left + i) % self.m_tiles for i in range(left)]
        lengths = Counter[int]()
        for place, count in Counter(places).items():
            lengths[self.length(place)] += count
        return lengths

    def cut_tail(self) -> tuple[Parts, float]:
        """Its parts, and the clocks that they save."""
        return split_tail(self.tiles, self.tail(), self.num_sms, self.part_bytes, self.cut)


def cut_launch(cut: Cutting, num_sms: int, shape: Shape, *, splits: bool, fixed: bool = False
               ) -> tuple[Cutting, Parts]:
    """(`cut` with the rows that the query tiles of a call have, how the last of them are cut along their keys).
    `fixed`: whatever the call, as many as the kernel has.

    Fewer rows are more tiles, which fill the SMs where tall ones would leave some idle; but each tile reads all the
    keys, and a single warpgroup hides nothing.
    """
    tallest = Grid.of(cut, num_sms, shape)
    if fixed or tallest.rounds > MANY_ROUNDS:
        return cut, tallest.cut_tail()[0] if splits else Parts.none(tallest.tiles)
    return _cheapest(cut, num_sms, splits, shape)[:2]


@functools.lru_cache(maxsize=1024)  # best_twin asks first, and then the launch of the kernel that it chose
def _cheapest(cut: Cutting, num_sms: int, splits: bool, shape: Shape) -> tuple[Cutting, Parts, float]:
    """Of all numbers of warpgroups: as cut_launch, and the clocks."""
    choices = []
    for rows in range(cut.rows, 0, -WARPGROUP_ROWS):
        grid = Grid.of(cut._replace(rows=rows), num_sms, shape)
        parts, saved = grid.cut_tail() if splits else (Parts.none(grid.tiles), 0.0)
        choices.append((grid.cut, parts, (grid.clocks() - saved) * (SPLITTING_COSTS if splits else 1.0)))
    return min(choices, key=lambda choice: choice[2])


def best_twin(cuts: tuple[Cutting, Cutting, Cutting], num_sms: int, shape: Shape) -> tuple[bool, bool | None]:
    """Whether a dense call had better be served by a kernel that can cut its last tiles, because it does or because its
    key tiles are wide, and by one that packs the query heads of a kv head into its tiles; None where none can. `cuts`:
    of the three KINDS of the tile table.

    Packing must spare rows that are multiplied for nothing, and not have keys read more often. Long sequences have as
    many rows packed or not, and unpacked ones are stored faster.
    """
    group = shape.num_heads_q // shape.num_heads_kv
    packs = None
    if group <= WARPGROUP_ROWS:
        packs = (-(-shape.seqlen_q // (WARPGROUP_ROWS // group))
                 <= PACKING_GAIN * group * -(-shape.seqlen_q // WARPGROUP_ROWS))
    whole, cut, _ = cuts
    if packs:
        return True, packs  # all that pack can cut
    if Grid.of(whole, num_sms, shape).rounds > MANY_ROUNDS:
        wide = cut.keys >= WIDE_TILE and shape.seqlen_kv >= WIDE_KEYS
        return wide or Grid.of(cut, num_sms, shape).cut_tail()[0].max_splits > 1, packs
    return _cheapest(cut, num_sms, True, shape)[2] < _cheapest(whole, num_sms, False, shape)[2], packs


def split_tail(num_tiles: int, lengths: Mapping[int, int], num_sms: int, part_bytes: int, cut: Cutting
               ) -> tuple[Parts, float]:
    """How to cut the tiles of the last, incomplete round, and how many clocks that saves. `lengths`: how many of them
    have so many tiles of keys.

    Whole rounds of num_sms tiles keep every SM busy. The remainder would leave SMs idle in a last round of its own, so
    its tiles are cut along the keys into parts, which take less time. A kernel that splits is itself a little slower,
    so less than SPLIT_GAIN of the whole is no reason to. `part_bytes`: of device memory, for the rows that exist.
    """
    rest, longest, step = sum(lengths.values()), max(lengths, default=1), cut.step_clocks
    unsplit = longest * step + ROUND_CLOCKS if rest else 0.0
    best, least = Parts.none(num_tiles), unsplit
    enough = least - SPLIT_GAIN * -(-num_tiles // num_sms) * longest * step
    for count in range(2, min(MAX_PARTS, longest) + 1):
        size = -(-longest // count)
        parts = sum(tiles * -(-length // size) for length, tiles in lengths.items())
        rounds = -(-parts // num_sms)
        cost = rounds * (size * step + ROUND_CLOCKS) + MERGE_CLOCKS + parts * part_bytes * BYTE_CLOCKS
        if cost < min(enough, 0.98 * least if best.max_splits > 1 else least):  # of those about as good, the fewest
            best, least = Parts(num_tiles - rest, size, -(-longest // size), num_tiles - rest + parts), cost
        if rounds > MAX_ROUNDS:
            break
    return best, unsplit - least


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
