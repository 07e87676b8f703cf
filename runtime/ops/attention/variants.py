"""`flashgen bench` of specs with expressions: each beside compiled FlexAttention and, where one answers the same, our
own built-in mask, on the same inputs and interleaved in one run. No torch.
"""
from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from flashgen.codegen.spec.spec import Spec, load_specs, spec_path
from flashgen.errors import SpecError
from flashgen.runtime.measure.bench import (
    CALLS_PER_GRAPH,
    OURS,
    Call,
    Refused,
    Run,
    digits,
    document,
    interleave,
    sets_needed,
)
from flashgen.runtime.ops.attention.cases import Case, cases_of, read_grid

PEERS = ("flex", "built-in")
FLEX = ("causal", "sliding_window", "softcap", "alibi", "document", "prefix_lm")  # flex.py has these
_KEYS = ("name", "spec", "score", "mask", "params", "causal", "values", "flex", "built_in")
_PLAIN = {"family": "fa3", "arch": "sm_90a", "name": "bench"}


@dataclass(frozen=True)
class VariantCase:
    """A variant on a problem. `values` of its parameters: a number, or for a tensor how it is drawn:
    "slopes", "documents LENGTH" (the mean) or "prefix PART" (of the keys)."""

    name: str
    case: Case
    spec: Spec | None = None      # None: a built-in mask, the case's
    values: Mapping[str, Any] = field(default_factory=dict)
    flex: str = ""                # of FLEX
    built_in: Mapping[str, Any] | None = None  # arguments of the call without a spec that answers the same

    @property
    def label(self) -> str:
        return f"{self.name}, {self.case.shape}"


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
    return tuple(_case(entry, case, where) for entry in entries for case in cases_of([values], where))


def _case(entry: Mapping[str, Any], case: Case, where: str) -> VariantCase:
    for key in entry:
        if key not in _KEYS:
            raise SpecError(f"unknown key {key}", where=where, allowed=", ".join(_KEYS))
    causal = bool(entry.get("causal", False))
    problem = Case(**{**_fields(case), "causal": causal})
    built_in = entry.get("built_in")
    if built_in is not None:
        built_in = {name: tuple(value) if isinstance(value, list) else value for name, value in built_in.items()}
    spec = _spec(entry, problem, where)
    flex = entry.get("flex", entry.get("spec", ""))
    return VariantCase(entry["name"], problem, spec, entry.get("values", {}), flex, built_in)


def _fields(case: Case) -> dict[str, Any]:
    return {name: getattr(case, name) for name in asdict(case)}


def _spec(entry: Mapping[str, Any], case: Case, where: str) -> Spec | None:
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


# -- a run


class Device(Protocol):
    """What a run needs of the machine; bench_flex.VariantDevice, or a stand-in in tests."""

    l2_bytes: int

    def facts(self) -> dict[str, Any]: ...
    def absent(self, peer: str) -> str | None: ...
    def warm(self, cases: Sequence[VariantCase], peers: Sequence[str]) -> None: ...
    def inputs(self, case: VariantCase, sets: int) -> Sequence[Any]: ...
    def pairs(self, case: VariantCase, inputs: Any) -> int: ...
    def calls(self, name: str, case: VariantCase, inputs: Sequence[Any]) -> Sequence[Call]: ...
    def more(self) -> dict[str, Any]: ...  # what else is known of the case at hand, for its row
    def timed(self, name: str, calls: Sequence[Call]) -> Run: ...
    def release(self) -> None: ...


def bench_variants(device: Device, cases: Sequence[VariantCase], peers: Sequence[str], *, rounds: int,
                   timer: str = "graph", given_commit: str | None = None,
                   progress: Callable[[int, str], None] = lambda done, what: None,
                   store: Callable[[dict[str, Any]], object] = lambda results: None) -> dict[str, Any]:
    """All cases: the document that write_results stores. `store` gets it after every row, so that none is lost."""
    absent = {name: reason for name in peers if (reason := device.absent(name)) is not None}
    present = [name for name in peers if name not in absent]
    rows: list[dict[str, Any]] = []
    start = time.monotonic()
    device.warm(cases, present)
    seconds = {"compiling": round(time.monotonic() - start, 1)}

    def results() -> dict[str, Any]:
        return document(device.facts(), given_commit, absent=absent, seconds=dict(seconds), rows=rows)

    for done, case in enumerate(cases):
        progress(done, case.label)
        rows.append(_measure(device, case, present, rounds, timer))
        device.release()
        seconds["all"] = round(time.monotonic() - start, 1)
        store(results())
    progress(len(cases), "")
    return results()


def _measure(device: Device, case: VariantCase, peers: Sequence[str], rounds: int, timer: str) -> dict[str, Any]:
    inputs = device.inputs(case, sets_needed(case.case.bytes, device.l2_bytes))
    calls, refused = {OURS: device.calls(OURS, case, inputs)}, {}
    for name in peers:
        try:
            calls[name] = device.calls(name, case, inputs)
        except Refused as err:
            refused[name] = err.what
    repeats = math.ceil(CALLS_PER_GRAPH / len(inputs))
    used, runs = timer, {}
    try:
        runs = {name: device.timed(used, [*own] * repeats) for name, own in calls.items()}
    except Refused:  # one that no graph can hold: plain calls for all of the row
        used = "events"
        runs = {name: device.timed(used, [*own] * repeats) for name, own in calls.items()}
    return row_of(case, device.pairs(case, inputs[0]), used, interleave(runs, rounds), refused) | device.more()


def row_of(case: VariantCase, pairs: int, timer: str, medians: Mapping[str, float],
           refused: Mapping[str, str]) -> dict[str, Any]:
    """`speed`: ours over each peer's. `pairs`: visible ones, over all heads and sequences."""
    ours, problem = medians[OURS], case.case
    peers = {name: digits(ms) for name, ms in medians.items() if name != OURS}
    expressions = case.spec.expressions.signature if case.spec else ""
    return {"name": case.name, "case": {key: list(v) if isinstance(v, tuple) else v
                                        for key, v in asdict(problem).items()},
            "expressions": expressions, "values": dict(case.values),
            "kernel": f"{case.spec.variant}.{case.spec.arch}" if case.spec else "", "timer": timer,
            "ours_ms": digits(ours), "peers": peers, "refused": dict(refused),
            "speed": {name: digits(ms / ours) for name, ms in peers.items()}, "pairs": pairs,
            "tflops": digits(2 * pairs * (problem.head_dim_qk + problem.head_dim_v) / ours / 1e9)}


def results_stem(grid: str) -> str:
    return Path(grid).stem.replace("_", "-") if Path(grid).suffix else "variants"
