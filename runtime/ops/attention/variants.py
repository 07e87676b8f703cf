"""`flashgen bench` of specs with expressions: each beside compiled FlexAttention and, where one answers the same, our
own built-in mask, on the same inputs and interleaved in one run. No torch.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashgen.codegen.spec.spec import Spec, load_specs, spec_path
from flashgen.errors import SpecError
from flashgen.runtime.measure.bench import OURS, Device, digits, figures
from flashgen.runtime.measure.grid import read_grid
from flashgen.runtime.measure.suite import MS, TFLOPS, Bench, Column, Row, decimals, peer_ms
from flashgen.runtime.ops.attention.bench import AXES, cases_of
from flashgen.runtime.ops.attention.problem import Problem

if TYPE_CHECKING:
    from flashgen.runtime.ops.attention.flex import VariantJob

NO_MASK = "no built-in mask gives this answer"
_KEYS = ("name", "spec", "score", "mask", "params", "causal", "values", "flex", "built_in")
_PLAIN = {"family": "fa3", "arch": "sm_90a", "name": "bench"}


@dataclass(frozen=True)
class VariantCase:
    """A variant on a problem. `values` of its parameters: a number, or for a tensor how it is drawn:
    "slopes", "documents LENGTH" (the mean) or "prefix PART" (of the keys)."""

    name: str
    problem: Problem
    spec: Spec | None = None      # None: a built-in mask, the case's
    values: Mapping[str, Any] = field(default_factory=dict)
    flex: str = ""                # of flex.MODS
    built_in: Mapping[str, Any] | None = None  # arguments of the call without a spec that answers the same
    grid: str = ""                # that lists it; processes that compile ahead read it again

    @property
    def label(self) -> str:
        return f"{self.name}, {self.problem.shape}"

    @property
    def flops(self) -> int:
        """As if no expression hid a pair."""
        return self.problem.flops

    @property
    def bytes(self) -> int:
        return self.problem.bytes


def has_variants(grid: str) -> bool:
    """Whether a grid lists variants, and so is one for this module."""
    values = read_grid(grid)[0]
    return isinstance(values, dict) and "variants" in values


def load_variants(grid: str) -> tuple[VariantCase, ...]:
    """A mapping as in other grids, whose key `variants` lists mappings: name and spec (or score, mask, params),
    causal, values, flex, built_in. Raises SpecError."""
    values, where = read_grid(grid)
    assert isinstance(values, dict)
    entries = values.pop("variants")
    if not isinstance(entries, list) or not entries or not all(
            isinstance(entry, dict) and "name" in entry for entry in entries):
        raise SpecError("variants is no list of mappings with a name", where=where, allowed=", ".join(_KEYS))
    return tuple(replace(_case(entry, case, where), grid=grid) for entry in entries for case in cases_of(values, where))


def _case(entry: Mapping[str, Any], case: Problem, where: str) -> VariantCase:
    for key in entry:
        if key not in _KEYS:
            raise SpecError(f"unknown key {key}", where=where, allowed=", ".join(_KEYS))
    causal = bool(entry.get("causal", False))
    problem = replace(case, causal=causal)
    built_in = entry.get("built_in")
    if built_in is not None:
        built_in = {name: tuple(value) if isinstance(value, list) else value for name, value in built_in.items()}
    spec = _spec(entry, problem, where)
    flex = entry.get("flex", entry.get("spec", ""))
    return VariantCase(entry["name"], problem, spec, entry.get("values", {}), flex, built_in)


def _spec(entry: Mapping[str, Any], case: Problem, where: str) -> Spec | None:
    """The fa3 variant of a shipped spec, or one made of the entry's own expressions."""
    if "spec" in entry:
        fitting = [spec for spec in load_specs(spec_path(entry["spec"])).specs
                   if (spec.family, spec.dtype, spec.head_dim_qk, spec.head_dim_v, spec.kv_layout, spec.causal)
                   == ("fa3", case.dtype, case.head_dim_qk, case.head_dim_v, "dense", case.causal)]
        if not fitting:
            raise SpecError(f"{entry['spec']} has no fa3 variant for {case.label}", where=where,
                            next=f"flashgen list {entry['spec']}")
        return fitting[0]
    own = {key: entry[key] for key in ("score", "mask", "params") if key in entry}
    if not own:
        return None
    from flashgen.codegen.spec.expressions import checked_params

    return Spec(**{**_PLAIN, "pass_": "fwd", "dtype": case.dtype, "head_dim_qk": case.head_dim_qk,
                   "head_dim_v": case.head_dim_v, "causal": case.causal, **own,
                   "params": checked_params(own.get("params", {}))})


# -- the bench


class VariantBench(Bench):
    """Of a grid: no spec is named beside it."""

    axes = AXES
    peers = ("flex", "built-in")
    module = "flashgen.runtime.ops.attention.flex"
    falls_back = keeps_rows = True

    def load(self, grid: str | None, specs: Sequence[Spec]) -> Sequence[VariantCase]:
        if grid is None or not has_variants(grid):
            raise SpecError("no SPEC, and no grid that lists variants", where="bench",
                            allowed="flashgen bench SPEC..., or --problem-grid GRID with a key `variants`",
                            nearest="--problem-grid benchmarks/grids/fa3_variants.yaml")
        return load_variants(grid)

    def stem(self, grid: str | None, data: str, specs: Sequence[Spec]) -> str:
        return Path(grid).stem.replace("_", "-") if grid and Path(grid).suffix else "variants"

    def work(self, cases: Sequence[VariantCase], specs: Sequence[Spec], device: Device
             ) -> Sequence[tuple[VariantCase, Spec | None]]:
        return [(case, case.spec) for case in cases]

    def warm(self, cases: Sequence[VariantCase], peers: Sequence[str]) -> None:
        import_module(self.module).warm(cases, peers)

    def row(self, job: VariantJob, medians: Mapping[str, float], refused: Mapping[str, str], timer: str
            ) -> dict[str, Any]:
        """`speed`: ours over each peer's. `pairs`: visible ones, over all heads and sequences."""
        case, problem, pairs = job.case, job.case.problem, job.visible_pairs()
        found = figures(medians, refused, 2 * pairs * (problem.head_dim_qk + problem.head_dim_v), problem.bytes)
        return {"name": case.name, "case": self.in_json(problem),
                "expressions": case.spec.expressions.signature if case.spec else "", "values": dict(case.values),
                "kernel": f"{case.spec.variant}.{case.spec.arch}" if case.spec else "", "timer": timer,
                **{name: found[name] for name in ("ours_ms", "peers", "refused", "tflops")}, "pairs": pairs,
                "speed": {name: digits(ms / medians[OURS]) for name, ms in found["peers"].items()},
                **({"flex_block_mask_ms": round(job.made[0], 3)} if job.made else {})}

    def notes(self, device: Device, seconds: Mapping[str, float]) -> dict[str, Any]:
        return {"seconds": dict(seconds)}

    def heading(self, results: Row) -> str:
        return f"; seconds: {results['seconds']}"

    def columns(self, peers: Sequence[str]) -> Sequence[Column]:
        def speed(name: str) -> Column:
            return Column(">speed", lambda row: decimals(row["speed"].get(name), 3))

        return [Column("variant", lambda row: row["name"]),
                Column("case", lambda row: "B{batch} S{seqlen_q}".format(**row["case"])),
                Column("timer", lambda row: row["timer"]), MS, TFLOPS,
                *(column for name in peers for column in (peer_ms(name, ""), speed(name)))]

    def refusals(self, row: Row) -> list[str]:
        return [f"{row['name']}: {name}: {why}" for name, why in row["refused"].items() if why != NO_MASK]


BENCH = VariantBench()
