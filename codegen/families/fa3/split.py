"""How an fa3 launch cuts query tiles along their keys, how many rows they have, and in which order it takes heads. No
torch, no CUDA.

A change here that gives other values for the same plan is a change of bundle.LAUNCH_RULES.
"""
from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from flashgen.codegen.families.shared.launch import Sizes
from flashgen.codegen.smem import round_up
from flashgen.codegen.warpgroup import WARPGROUP_ROWS
from flashgen.errors import UnsupportedError

MAX_SPLITS = 128            # of the keys of one query tile
MAX_WAVES = 4               # of splits over all SMs: more never paid
PACKING_GAIN = 0.75         # of the rows multiplied: with more of them left, packing is not worth its slower stores
# Only kernels that split have key tiles this wide. They pay from this many keys on, split or not (docs/lab/fa3.md).
WIDE_TILE, WIDE_KEYS = 128, 4096
SPLIT_GAIN = 0.012          # docs/lab/fa3.md: predicted gains below it were losses
MANY_WAVES = 4              # of the tallest tiles over all SMs: from there on, less tall ones only cost
# Four costs in SM cycles, fitted to every number of warpgroups and splits of 250 calls on an H200, docs/results/fa3.md:
# prologue and epilogue of a query tile per warpgroup, one more wave, one wait for splits, one byte of partial output
# written and read back.
WARPGROUP_CYCLES, WAVE_CYCLES, MERGE_CYCLES, BYTE_CYCLES = 600, 1600, 4800, 9.5e-4
SPLITTING_COSTS = 1.02      # the time of kernels that can split, even where they do not
SECTION_HEADS = 16          # docs/lab/fa3.md: 8 to 32 are as good, all heads at once cost up to a fifth
SECTION_BYTES = 32 << 20    # of K and V that L2 keeps beside what else passes through it
LAST_WAVES = 3              # of query tiles over all SMs, sorted by length at the end of the grid


class TileConfig(NamedTuple):
    """What of a kernel, and of a launch of it, decides how its tiles are split and ordered."""

    rows: int  # of a query tile; of a kernel, at most
    keys: int  # of a tile of keys
    causal: bool
    pack_gqa: bool
    head_dim_qk: int
    head_dim_v: int
    element_bytes: int
    by_class: bool = False  # data decides which key tiles count

    def queries(self, group: int) -> int:
        """Of a tile, where `group` query heads share a kv head. UnsupportedError if those exceed a warpgroup's rows."""
        if not self.pack_gqa:
            return self.rows
        if group > WARPGROUP_ROWS:
            raise UnsupportedError(f"{group} query heads for each kv head", where="pack_gqa",
                                   allowed=f"at most {WARPGROUP_ROWS}", nearest="a kernel without pack_gqa")
        return self.rows // WARPGROUP_ROWS * (WARPGROUP_ROWS // group)

    @property
    def warpgroups(self) -> int:
        return -(-self.rows // WARPGROUP_ROWS)

    @property
    def split_row_bytes(self) -> int:
        """Bytes of device memory that one row of a split takes (layout: merge_per_warp.cuh)."""
        return 4 * round_up(self.head_dim_v, 16) + 32

    @property
    def step_cycles(self) -> float:
        """What a tile of keys takes: the chain of one warpgroup, products and softmax, or, of many warpgroups, whatever
        is busiest, with a soft edge between the two. Within a tenth of the timed ones (docs/results/fa3.md)."""
        products = 2 * WARPGROUP_ROWS * self.keys * (self.head_dim_qk + self.head_dim_v) / 4096  # FLOP per cycle
        exponentials = WARPGROUP_ROWS * self.keys / 16  # per cycle
        # What one warpgroup cannot hide: its softmax, and of its products what the softmax waits for. Fitted.
        chain = 230 + 4.6 * self.keys + 0.885 * products
        busiest = (products ** 3 + exponentials ** 3) ** (1 / 3)
        return float(((self.warpgroups * busiest) ** 5 + chain ** 5) ** 0.2)


class SplitPlan(NamedTuple):
    """How the tiles after the first `full_tiles` are split along their keys: parameters of the kernel."""

    full_tiles: int
    tiles_per_split: int  # key tiles
    max_splits: int       # of one query tile
    num_work_tiles: int   # full tiles and splits

    @classmethod
    def none(cls, num_tiles: int) -> SplitPlan:
        return cls(num_tiles, 1, 1, num_tiles)


class ProblemShape(NamedTuple):
    """The sizes that count here, of a dense call or of one that stands for a varlen call; the key of a memo."""

    batch: int
    seqlen_q: int
    seqlen_kv: int
    num_heads_q: int
    num_heads_kv: int
    top_left: bool = False
    window: tuple[int, int] = (-1, -1)

    @classmethod
    def of(cls, sizes: Sizes) -> ProblemShape:
        return cls(*(getattr(sizes, name) for name in cls._fields))


class TileGrid(NamedTuple):
    """The query tiles of a call."""

    config: TileConfig
    num_sms: int
    m_tiles: int    # of a head and sequence
    heads: int      # of all sequences; packed: of keys
    group: int      # query heads of a kv head
    seqlen_q: int
    seqlen_kv: int
    shift: int      # of the last key that a row sees against the row, causal
    reach: int      # keys that a tile sees, at most

    @classmethod
    def of(cls, config: TileConfig, num_sms: int, shape: ProblemShape) -> TileGrid:
        group = shape.num_heads_q // shape.num_heads_kv
        queries, keys = config.queries(group), shape.seqlen_kv
        reach = keys if min(shape.window) < 0 else min(keys, sum(shape.window) + queries + config.keys)
        return cls(config, num_sms, -(-shape.seqlen_q // queries),
                   (shape.num_heads_kv if config.pack_gqa else shape.num_heads_q) * shape.batch, group,
                   shape.seqlen_q, keys, 0 if shape.top_left else keys - shape.seqlen_q, reach)

    @property
    def tiles(self) -> int:
        return self.m_tiles * self.heads

    @property
    def waves(self) -> int:
        return -(-self.tiles // self.num_sms)

    @property
    def split_bytes(self) -> int:
        """Bytes of a split's partial output, for the rows that exist."""
        queries = self.config.queries(self.group)
        return min(self.seqlen_q, queries) * (self.group if self.config.pack_gqa else 1) * self.config.split_row_bytes

    def length(self, place: int) -> int:
        """Tiles of keys of a tile of queries: number `place` of a head, the longest first. As num_splits in
        templates/fa3/splits.cuh.j2 counts them."""
        last = self.reach
        if self.config.causal:
            # Tiles end with the last group of queries (first_group in flashgen/query_groups.cuh).
            queries = self.config.queries(self.group)
            end = round_up(self.seqlen_q, queries // self.config.warpgroups) - place * queries
            last = min(end, self.seqlen_q) - 1 + self.shift
        return max(min(last, self.seqlen_kv - 1), 0) // self.config.keys + 1

    def cycles(self) -> float:
        """SM cycles of all tiles, beyond what every launch takes. Tiles of different lengths, the longest first,
        each to the SM that is free first, end as well as together: as good a guess as going through them all."""
        longest, shortest = self.length(0), self.length(self.m_tiles - 1)
        busiest = max(longest, self.waves * shortest, self.tiles * (longest + shortest) / 2 / self.num_sms)
        return (self.config.warpgroups * WARPGROUP_CYCLES + busiest * self.config.step_cycles
                + max(self.waves - 1, 0) * WAVE_CYCLES)

    def last_wave(self) -> dict[int, int]:
        """How many of the tiles of the last, incomplete wave have so many key tiles; none where they need no
        splits."""
        left = self.tiles % self.num_sms
        if self.config.causal and not self.config.pack_gqa:
            # Blocks fetch long tiles first and end together without splits, unless tiles are few or equally
            # long.
            if self.tiles >= self.num_sms and self.seqlen_kv < 2 * self.seqlen_q:
                return {}
            # The last tiles of slots/order/longest_first.cuh.j2, whose last section is longer.
            heads = sections(self.config, self.num_sms, self.heads, self.m_tiles, self.seqlen_kv,
                             self.group)["heads_at_the_end"]
            places = [(heads * self.m_tiles - left + i) // heads for i in range(left)]
        else:
            places = [(self.tiles - left + i) % self.m_tiles for i in range(left)]
        lengths = Counter[int]()
        for place, count in Counter(places).items():
            lengths[self.length(place)] += count
        return lengths

    def plan_splits(self) -> tuple[SplitPlan, float]:
        """The splits of the last wave, and the SM cycles that they save."""
        return split_last_wave(self.tiles, self.last_wave(), self.num_sms, self.split_bytes, self.config)


def cut_launch(config: TileConfig, num_sms: int, shape: ProblemShape, *, splits: bool, fixed: bool = False
               ) -> tuple[TileConfig, SplitPlan]:
    """(`config` with the rows that the query tiles of a call have, how the last of them are split along their keys).
    `fixed`: whatever the call, as many as the kernel has.

    Fewer rows are more tiles, which fill the SMs where tall ones would leave some idle; but each tile reads all the
    keys, and a single warpgroup hides nothing.
    """
    tallest = TileGrid.of(config, num_sms, shape)
    if fixed or tallest.waves > MANY_WAVES:
        return config, tallest.plan_splits()[0] if splits else SplitPlan.none(tallest.tiles)
    return _best(config, num_sms, splits, shape)[:2]


@functools.lru_cache(maxsize=1024)  # best_variant asks first, and then the launch of the kernel that it chose
def _best(config: TileConfig, num_sms: int, splits: bool, shape: ProblemShape) -> tuple[TileConfig, SplitPlan, float]:
    """The cheapest number of warpgroups: as cut_launch, and the SM cycles."""
    choices = []
    for rows in range(config.rows, 0, -WARPGROUP_ROWS):
        grid = TileGrid.of(config._replace(rows=rows), num_sms, shape)
        split_plan, saved = grid.plan_splits() if splits else (SplitPlan.none(grid.tiles), 0.0)
        choices.append((grid.config, split_plan, (grid.cycles() - saved) * (SPLITTING_COSTS if splits else 1.0)))
    return min(choices, key=lambda choice: choice[2])


def best_variant(configs: Sequence[TileConfig], num_sms: int, shape: ProblemShape) -> tuple[bool, bool | None]:
    """Whether a dense call had better be served by a kernel that can split its last tiles, because it
    does or because its key tiles are wide, and by one that packs the query heads of a kv head into its tiles; None
    where none can. `configs`: of the three KINDS of the tile table.

    Packing must spare rows that are multiplied for nothing, and not have keys read more often. Long sequences have as
    many rows packed or not, and unpacked ones are stored faster.
    """
    group = shape.num_heads_q // shape.num_heads_kv
    packs = None
    if group <= WARPGROUP_ROWS:
        packs = (-(-shape.seqlen_q // (WARPGROUP_ROWS // group))
                 <= PACKING_GAIN * group * -(-shape.seqlen_q // WARPGROUP_ROWS))
    whole, config, _ = configs
    if packs:
        return True, packs  # all that pack can split
    if TileGrid.of(whole, num_sms, shape).waves > MANY_WAVES:
        wide = config.keys >= WIDE_TILE and shape.seqlen_kv >= WIDE_KEYS
        return wide or TileGrid.of(config, num_sms, shape).plan_splits()[0].max_splits > 1, packs
    return _best(config, num_sms, True, shape)[2] < _best(whole, num_sms, False, shape)[2], packs


def split_last_wave(num_tiles: int, lengths: Mapping[int, int], num_sms: int, split_bytes: int, config: TileConfig
                    ) -> tuple[SplitPlan, float]:
    """How to split the tiles of the last, incomplete wave, and how many SM cycles that saves. `lengths`: how many of
    them have so many key tiles.

    Whole waves of num_sms tiles keep every SM busy. The remainder would leave SMs idle in a last wave of its own, so
    its tiles are split along the keys, and splits take less time. A kernel that splits is itself a little slower,
    so less than SPLIT_GAIN of the whole is no reason to. `split_bytes`: of device memory, for the rows that exist.
    """
    rest, longest, step = sum(lengths.values()), max(lengths, default=1), config.step_cycles
    unsplit = longest * step + WAVE_CYCLES if rest else 0.0
    best, least = SplitPlan.none(num_tiles), unsplit
    enough = least - SPLIT_GAIN * -(-num_tiles // num_sms) * longest * step
    for count in range(2, min(MAX_SPLITS, longest) + 1):
        size = -(-longest // count)
        num_splits = sum(tiles * -(-length // size) for length, tiles in lengths.items())
        waves = -(-num_splits // num_sms)
        cost = waves * (size * step + WAVE_CYCLES) + MERGE_CYCLES + num_splits * split_bytes * BYTE_CYCLES
        if cost < min(enough, 0.98 * least if best.max_splits > 1 else least):  # of those about as good, the fewest
            best, least = SplitPlan(num_tiles - rest, size, -(-longest // size), num_tiles - rest + num_splits), cost
        if waves > MAX_WAVES:
            break
    return best, unsplit - least


def sections(config: TileConfig, num_sms: int, heads: int, m_tiles: int, seqlen_kv: int, heads_per_kv_head: int
             ) -> dict[str, int]:
    """How slots/order/longest_first.cuh.j2 goes through query heads: those of all sequences; of a varlen call, those of
    all sequences as one, with seqlen_kv keys.

    heads_per_section: as many as read SECTION_BYTES of K and V together, so that L2 keeps them while the query tiles of
    a section are worked on; at least 1, at most SECTION_HEADS. heads_at_the_end: enough for LAST_WAVES waves of all
    SMs, whose tiles end in order of length. heads_before_the_end: the others, in whole sections. Where data decide
    which keys a query tile reads, nobody knows how many bytes that will be, and SECTION_HEADS even out its length.
    """
    key_bytes = 0 if config.by_class else seqlen_kv * (config.head_dim_qk + config.head_dim_v) * config.element_bytes
    per_section = max(1, min(SECTION_HEADS, heads, SECTION_BYTES * heads_per_kv_head // max(key_bytes, 1)))
    at_the_end = min(heads, -(-LAST_WAVES * num_sms // max(m_tiles, 1)))
    before = (heads - at_the_end) // per_section * per_section
    return {"heads_per_section": per_section, "heads_before_the_end": before, "heads_at_the_end": heads - before}
