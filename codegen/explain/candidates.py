"""Candidate tiles of a variant for `flashgen tune`: a grid, what of it fits, and a model that orders the rest. Pure.

A candidate is the variant's spec with every tile field spelled out, and the plan that lower() makes of it, so whatever
lower() and verify() refuse (registers, shared memory, threads, rules of the spec) is never proposed. What the spec sets
itself stays as it is and narrows the grid. Whatever is dropped is counted under its reason.

The model counts clocks of one SM, averaged over the SMs of the target's card, for each problem:

- tensor cores: products of whole tiles, so that rows and keys past the end and masked keys of masked tiles count;
- exponential unit and issue slots: of the scores of those tiles, at the rates of counts.py;
- shared memory: operands read by each wgmma or ldmatrix, and tiles written by the copies, at 128 bytes per clock;
- L2: k and v once per query tile, q and out once, at 32 bytes per clock and SM.

All are multiplied by the share of SMs that idle in the last round, where the kernel neither cuts tiles along the keys
nor begins with the longest. The slowest unit is the candidate's floor. Candidates whose floor is more than 25 % above
the best candidate's are dropped under the name of that unit. Of the others the prediction decides the order: the
floor, plus what the other units need, of which 1/actors shows (actors: warpgroups, or warps per scheduler, at most 3),
plus latencies that nothing hides: of each key tile's trip, of loads that the stages do not cover, of each query tile's
start. The latencies are rough: they order candidates, and forecast nothing. Schedules are told apart by timing alone.
Over several problems the geometric mean counts.
"""
from __future__ import annotations

import collections
import functools
import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flashgen.codegen.explain.counts import (
    EXP2_PER_CLOCK,
    INSTRUCTIONS_PER_CLOCK,
    INSTRUCTIONS_PER_SCORE,
    TENSOR_FLOPS_PER_CLOCK,
    Shape,
    parse_shape,
)
from flashgen.codegen.families.registry import FAMILIES, lower
from flashgen.codegen.families.shared.tiles import Row, TileTable
from flashgen.codegen.mask import TileCounts, tile_counts, visible_pairs
from flashgen.codegen.plan import Plan
from flashgen.codegen.slots import mask_choice
from flashgen.codegen.smem import ELEMENT_BYTES
from flashgen.codegen.spec.spec import Roles, Spec, Tile
from flashgen.codegen.target import TARGETS
from flashgen.codegen.warpgroup import WARPGROUP_WARPS
from flashgen.errors import FlashgenError, PlanError, SpecError, UnsupportedError

MAX_CANDIDATES = 128              # every row timed so far is among the first 110
SLACK = 1.25                      # a floor this much above the best one is not worth a compilation
MMA_SYNC_FLOPS_PER_CLOCK = 2620   # an H200's, measured (docs/fa2.md); older cards have less and want shared memory less
SMEM_BYTES_PER_CLOCK = 128
L2_BYTES_PER_CLOCK = 32           # of an SM while all of them read
TRIP_CLOCKS = 100                 # of a key tile: barriers, reductions over a row, the first product's latency
LOAD_CLOCKS = 1000                # from the request of a tile to its arrival
START_CLOCKS = 1500               # of a query tile: its queries' way in and its output's way out
SCHEDULERS = 4                    # of an SM
MAX_ACTORS = 3                    # more of them fill no gaps: chosen so that the timed rows of tile tables rank high
TOKENS, HIDDEN, SEQLENS = 16384, 2048, (512, 2048, 8192)  # of the default problems
DEFAULT_WINDOW = (1024, 0)        # of those, for variants with a window

# What a refusal is counted under, by a word of its text; the first that occurs.
_REFUSALS = {"registers": "more registers than a thread has", "shared memory": "more shared memory than there is",
             "threads": "more threads than fit", "fragments": "query rows that the warps cannot share out",
             "pingpong": "turns of a single warpgroup", "p_operand": "key tiles that panels of P do not divide"}


@dataclass(frozen=True)
class Tiling:
    """The tile fields of a spec; `own`: those that its family alone has, with their values."""

    m: int
    n: int
    warps: int
    stages: int
    own: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        return f"{self.m} x {self.n}, {self.warps} warps, {self.stages} stages, " + ", ".join(
            f"{name} {value}" for name, value in self.own)

    def applied_to(self, spec: Spec) -> Spec:
        """The spec with these fields explicit. SpecError where they break its rules."""
        return spec.with_(tile=Tile(m=self.m, n=self.n), roles=Roles(mma=self.warps), stages=self.stages,
                          **dict(self.own))


@dataclass(frozen=True)
class Estimate:
    """Clocks of an SM, geometric means over the problems."""

    floor: float
    predicted: float
    bound: str      # the unit that is the floor of most of the work
    issued: float   # scores of whole tiles over visible pairs
    idle: float     # SM time over SM time at work, from the last round


@dataclass(frozen=True)
class Candidate:
    tiling: Tiling
    spec: Spec
    plan: Plan
    estimate: Estimate


@dataclass(frozen=True)
class Dropped:
    reason: str
    count: int
    example: str


@dataclass(frozen=True)
class Candidates:
    """`kept` in the order of the model's prediction. `present`, what the variant gets today, is among them whatever the
    model says; it is None, with `present_error`, where it does not fit. `considered` = kept + all dropped."""

    spec: Spec
    shapes: tuple[Shape, ...]
    considered: int
    kept: tuple[Candidate, ...]
    dropped: tuple[Dropped, ...]
    present: Candidate | None
    present_error: str = ""


_Drops = dict[str, list[str]]  # what was dropped, by reason


def _counted_drops(drops: _Drops) -> tuple[Dropped, ...]:
    rows = [Dropped(reason, len(examples), examples[0]) for reason, examples in drops.items()]
    return tuple(sorted(rows, key=lambda row: -row.count))


def default_shapes(spec: Spec) -> tuple[Shape, ...]:
    """16k tokens of hidden size 2048 in short, middling and long sequences."""
    heads = max(1, HIDDEN // spec.head_dim_qk)
    window = DEFAULT_WINDOW if spec.window else (-1, -1)
    return tuple(Shape(TOKENS // length, length, length, heads, heads, window) for length in SEQLENS)


def shapes_of(spec: Spec, problems: Sequence[str]) -> tuple[Shape, ...]:
    """The problems of a command line, in the words of `explain`; the default ones if there are none."""
    shapes = tuple(dict.fromkeys(Shape.of(**parse_shape(text)) for text in problems)) or default_shapes(spec)
    for shape in shapes:
        if shape.window != (-1, -1) and not spec.window:
            raise UnsupportedError(f"window is {shape.window}, and {spec.variant} has none", where="problem",
                                   allowed="a variant with `window: true`")
        if not visible_pairs(shape.seqlen_q, shape.seqlen_kv, _window(spec, shape)):
            raise UnsupportedError(f"no query of {shape} sees a key", where="problem")
    return shapes


def candidates(spec: Spec, shapes: Sequence[Shape], limit: int = MAX_CANDIDATES) -> Candidates:
    """What of the grid fits, at most `limit`, the present tile among them. PlanError if nothing fits."""
    drops: _Drops = collections.defaultdict(list)
    fitting = []
    grid, own = list(tilings(spec)), present_tiling(spec)
    present = _candidate(spec, own, shapes)
    for tiling in grid:
        found = _candidate(spec, tiling, shapes) if tiling != own else present
        if isinstance(found, FlashgenError):
            drops[_refusal(found)].append(f"{tiling}: {found.what}")
        elif tiling != own:
            fitting.append(found)
    there = [present] if isinstance(present, Candidate) else []
    if not fitting and not there:
        raise PlanError(f"none of {len(grid)} tiles fits {spec.variant} on {spec.arch}", where=spec.variant,
                        details="\n".join(f"  {row.count}: {row.reason}, such as {row.example}"
                                          for row in _counted_drops(drops)))
    best = min(c.estimate.floor for c in (*fitting, *there))
    for far in (c for c in fitting if c.estimate.floor > SLACK * best):
        drops[f"floor {100 * (SLACK - 1):.0f} % above the best, for {_blame(far.estimate)}"].append(
            f"{far.tiling}: {far.estimate.floor / best:.2f} times the best floor")
    near = _by_prediction([c for c in fitting if c.estimate.floor <= SLACK * best])
    room = max(0, limit - len(there))
    for late in near[room:]:
        drops[f"behind the {limit} that the model puts first"].append(str(late.tiling))
    return Candidates(spec, tuple(shapes), len(grid) + bool(there and own not in grid),
                      tuple(_by_prediction([*near[:room], *there])), _counted_drops(drops),
                      there[0] if there else None, "" if there else str(present))


def tile_table(spec: Spec) -> TileTable[Any]:
    """The table of the spec's family. PlanError for one that has one tile, and for a pass that takes no other tile."""
    family = FAMILIES[spec.family]
    tiles, fixed = family.tiles, {each.name: only.why for each in family.passes for only in each.only
                                  if only.field == "tile"}
    if spec.pass_ in fixed:
        raise PlanError(f"pass {spec.pass_} takes no tile from a spec: {fixed[spec.pass_]}", where=spec.variant,
                        allowed=", ".join(f"pass {name}" for name in family.by_name if name not in fixed))
    if tiles is None:
        raise PlanError(f"family {spec.family} has one tile", where=spec.variant,
                        allowed=", ".join(name for name, family in FAMILIES.items() if family.tiles))
    return tiles


def tilings(spec: Spec) -> Iterator[Tiling]:
    """The grid of the spec's family, narrowed to what the spec sets. PlanError for a family that has one tile."""
    table, fixed = tile_table(spec), _fixed(spec)
    axes = {name: fixed.get(name, values) for name, values in table.axes.items()}
    for values in itertools.product(*axes.values()):
        tile = dict(zip(axes, values, strict=True))
        if table.rows_per_warp:
            tile["warps"] = fixed.get("warps", (tile["m"] // table.rows_per_warp,))[0]
        yield Tiling(tile["m"], tile["n"], tile["warps"], tile["stages"],
                     tuple((name, tile[name]) for name in table.own))


def present_row(spec: Spec) -> Row:
    """The row of the table that serves the variant. PlanError without one."""
    table = tile_table(spec)
    row: Row | None = table.find(spec.arch, mask_choice(spec.causal, spec.window), spec.head_dim_qk, spec.head_dim_v,
                                 table.kind_of(spec))
    if row is None:
        raise PlanError(f"no {spec.family} tile for head dims ({spec.head_dim_qk}, {spec.head_dim_v}) on {spec.arch}",
                        where=spec.variant, next=f"add a row to codegen/families/{spec.family}/tiles.py to tune from")
    return row


def present_tiling(spec: Spec) -> Tiling:
    """What the variant gets today: the table's row, with the spec's own fields in place."""
    table = tile_table(spec)
    row = table.overridden(spec, present_row(spec))
    return Tiling(row.m, row.n, row.warps, row.stages,
                  tuple((name, getattr(spec, name) or getattr(row, name)) for name in table.own))


def _fixed(spec: Spec) -> dict[str, tuple[Any, ...]]:
    """The axes that the spec sets itself, each with its one value."""
    values = {name: getattr(spec, name) for name in ("stages", *tile_table(spec).own)}
    if spec.tile is not None:
        values |= {"m": spec.tile.m, "n": spec.tile.n}
    if spec.roles is not None:
        values["warps"] = spec.roles.mma
    return {name: (value,) for name, value in values.items() if value is not None}


def _candidate(spec: Spec, tiling: Tiling, shapes: Sequence[Shape]) -> Candidate | FlashgenError:
    try:
        explicit = tiling.applied_to(spec)
        plan = lower(explicit)
    except (SpecError, PlanError) as error:
        return error
    return Candidate(tiling, explicit, plan, estimate(plan, spec, shapes))


def _refusal(error: FlashgenError) -> str:
    return next((reason for word, reason in _REFUSALS.items() if word in error.what), error.what)


def _by_prediction(found: Sequence[Candidate]) -> list[Candidate]:
    """Equal ones in an order that is the same on every machine, the fewest stages first."""
    return sorted(found, key=lambda c: (c.estimate.predicted, c.tiling.stages, str(c.tiling)))


def _blame(found: Estimate) -> str:
    """What makes a floor high: the memory that bounds it, else what makes the arithmetic more than it need be."""
    if found.bound in ("shared memory", "L2"):
        return f"{found.bound} traffic"
    return "idle SMs in the last round" if found.idle > found.issued else "arithmetic of whole tiles"


# -- the model


def estimate(plan: Plan, spec: Spec, shapes: Sequence[Shape]) -> Estimate:
    """The same for all plans that another compiler makes threads and memory of: the model knows nothing of these."""
    if not plan.compiles_here:
        return Estimate(1.0, 1.0, "unknown", 1.0, 1.0)
    found = [_clocks(plan, spec, shape) for shape in shapes]
    totals: dict[str, float] = {}
    for units, idle, _ in found:
        for name, clocks in units.items():
            totals[name] = totals.get(name, 0.0) + idle * clocks
    mean = statistics.geometric_mean
    issued = [_scores(plan, spec, shape) / (_heads(shape) * visible_pairs(
        shape.seqlen_q, shape.seqlen_kv, _window(spec, shape))) for shape in shapes]
    return Estimate(mean([idle * max(units.values()) for units, idle, _ in found]),
                    mean([predicted for _, _, predicted in found]), max(totals, key=lambda name: totals[name]),
                    mean(issued), mean([idle for _, idle, _ in found]))


def _clocks(plan: Plan, spec: Spec, shape: Shape) -> tuple[dict[str, float], float, float]:
    """(clocks of each unit of an SM, factor of idle SMs, predicted clocks) of one problem."""
    num_sms, resident = TARGETS[plan.target].device.num_sms, plan.launch.min_blocks_per_sm
    tiles = _tiles(plan, spec, shape, plan.constant("BLOCK_M"))
    flags, query_tiles = dict(plan.flags), _heads(shape) * tiles.query_tiles
    even = flags.get("split") or ((spec.causal or spec.window) and query_tiles >= num_sms)
    idle = 1.0 if even else -(-query_tiles // num_sms) * num_sms / query_tiles
    units = {name: clocks / num_sms for name, clocks in _units(plan, spec, shape, tiles).items()}
    warps = next(role.warps for role in plan.roles if role.name == "mma")
    actors = min(MAX_ACTORS, max(1.0, warps * resident / (WARPGROUP_WARPS if plan.wgmma_shapes else SCHEDULERS)))
    slowest = max(units.values())
    trips = max(1.0, _heads(shape) * tiles.visited / num_sms)  # of an SM
    work = slowest + (sum(units.values()) - slowest + TRIP_CLOCKS * trips) / actors
    uncovered = max(0.0, LOAD_CLOCKS / resident - (plan.constant("NUM_STAGES") - 1) * work / trips)
    in_flight = plan.constant("Q_STAGES") if plan.wgmma_shapes else resident
    start = START_CLOCKS * query_tiles / num_sms / in_flight
    return units, idle, idle * (work + uncovered * trips + start)


def _units(plan: Plan, spec: Spec, shape: Shape, tiles: TileCounts) -> Mapping[str, float]:
    """Clocks of each unit, of all SMs together."""
    m, n = plan.constant("BLOCK_M"), plan.constant("BLOCK_N")
    columns_qk, columns = plan.constant("MMA_COLS_QK"), plan.constant("MMA_COLS_QK") + plan.constant("MMA_COLS_V")
    scores, trips = _scores(plan, spec, shape), _heads(shape) * tiles.visited
    rows = plan.rows_alone
    if plan.wgmma_shapes:  # each warpgroup's products read both operands of the first and one of the second
        read = rows * columns_qk + n * columns
    else:
        readers = next(role.warps for role in plan.roles if role.name == "mma")
        read = readers * n * columns + (m * columns_qk if dict(plan.flags).get("q_in_shared") else 0)
    written = trips * n * (plan.constant("SMEM_COLS_QK") + plan.constant("SMEM_COLS_V"))
    smem_elements = scores / (rows * n) * read + written
    once = _heads(shape) * shape.seqlen_q * (spec.head_dim_qk + spec.head_dim_v)
    kv = _heads(shape) * tiles.keys_loaded * (spec.head_dim_qk + spec.head_dim_v)
    return {
        "tensor cores": 2 * scores * columns / (TENSOR_FLOPS_PER_CLOCK if plan.wgmma_shapes
                                                else MMA_SYNC_FLOPS_PER_CLOCK),
        "exponential unit": scores / EXP2_PER_CLOCK,
        "issue slots": scores * INSTRUCTIONS_PER_SCORE / INSTRUCTIONS_PER_CLOCK,
        "shared memory": smem_elements * ELEMENT_BYTES / SMEM_BYTES_PER_CLOCK,
        "L2": (once + kv) * ELEMENT_BYTES / L2_BYTES_PER_CLOCK,
    }


def _scores(plan: Plan, spec: Spec, shape: Shape) -> int:
    """Of whole tiles, over all heads and sequences."""
    rows = plan.rows_alone
    return _heads(shape) * _tiles(plan, spec, shape, rows).visited * rows * plan.constant("BLOCK_N")


def _tiles(plan: Plan, spec: Spec, shape: Shape, rows: int) -> TileCounts:
    return _counted(shape.seqlen_q, shape.seqlen_kv, rows, plan.constant("BLOCK_N"), _window(spec, shape),
                    group=plan.rows_alone)


_counted = functools.lru_cache(maxsize=4096)(tile_counts)  # the same for all stages, warps and schedules


def _heads(shape: Shape) -> int:
    return shape.batch * shape.num_heads_q


def _window(spec: Spec, shape: Shape) -> tuple[int, int]:
    return (-1, 0) if spec.causal else shape.window
