"""`flashgen bench`: ours and the peers on the same inputs, interleaved in one run. Cases, medians, figures, JSON.

Nothing here touches a GPU: timers, inputs and peers come from bench_device.py, and tests bring their own.
"""
from __future__ import annotations

import datetime
import difflib
import itertools
import json
import math
import os
import re
import statistics
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from flashgen.codegen.dtype import DTYPES
from flashgen.codegen.mask import visible_pairs
from flashgen.errors import EnvironmentError_, SpecError, UnsupportedError

if TYPE_CHECKING:
    from flashgen.codegen.spec import Spec

ROUNDS = 15             # each implementation is timed once per round
WARMUP_ROUNDS = 3       # clocks and caches settle
CALLS_PER_GRAPH = 8     # so that the gap between two replays does not count
SETS_MAX = 2048         # of inputs: problems so small that more would be needed are bound by launches anyway
OURS = "flashgen"
ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Case:
    """One dense problem. `window` as in the API; causal is bottom-right aligned."""

    batch: int
    seqlen_q: int
    seqlen_kv: int
    num_heads_q: int
    num_heads_kv: int
    head_dim_qk: int
    head_dim_v: int
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    dtype: str = "bf16"

    @property
    def label(self) -> str:
        """As in `D128 H16 B2 S8192 causal`."""
        def pair(a: int, b: int) -> str:
            return f"{a}" if a == b else f"{a}/{b}"
        mask = "causal" if self.causal else "full"
        words = [f"D{pair(self.head_dim_qk, self.head_dim_v)}", f"H{pair(self.num_heads_q, self.num_heads_kv)}",
                 f"B{self.batch}", f"S{pair(self.seqlen_q, self.seqlen_kv)}",
                 mask if self.window == (-1, -1) else f"{mask} window {self.window[0]},{self.window[1]}"]
        return " ".join(words) + ("" if self.dtype == "bf16" else f" {self.dtype}")

    @property
    def flops(self) -> int:
        """Of the (query, key) pairs that the mask leaves; a multiply-add counts as two."""
        left, right = self.window
        window = (left, 0 if self.causal else right)
        pairs = visible_pairs(self.seqlen_q, self.seqlen_kv, window)
        return 2 * self.batch * self.num_heads_q * pairs * (self.head_dim_qk + self.head_dim_v)

    @property
    def bytes(self) -> int:
        """q, k, v and out once each."""
        rows_q, rows_kv = self.seqlen_q * self.num_heads_q, self.seqlen_kv * self.num_heads_kv
        return self.batch * (rows_q + rows_kv) * (self.head_dim_qk + self.head_dim_v) * DTYPES[self.dtype].bytes


# -- grids

_KEYS = ("batch", "tokens", "seqlen_q", "seqlen_kv", "num_heads_q", "num_heads_kv", "hidden", "head_dim_qk",
         "head_dim_v", "causal", "window", "dtype")


def load_grid(grid: str) -> tuple[Case, ...]:
    """Cases of a YAML file, or of YAML text that begins with `{`. Lists multiply. SpecError says what is wrong.

    `tokens` gives batch = tokens / seqlen_q, `hidden` gives num_heads_q = hidden / head_dim_qk; seqlen_kv, num_heads_kv
    and head_dim_v follow their twins unless given; `window` is a pair or a list of pairs.
    """
    import yaml

    inline = grid.lstrip().startswith("{")
    where = "--problem-grid" if inline else grid
    try:
        values = yaml.safe_load(grid if inline else Path(grid).read_text(encoding="utf-8"))
    except OSError as err:
        raise SpecError(f"cannot be read ({err.strerror})", where=where, allowed="a YAML file, or {key: value, ...}",
                        next="benchmarks/grids holds examples") from err
    except yaml.YAMLError as err:
        raise SpecError(f"is not YAML: {err}", where=where) from err
    if not isinstance(values, dict) or not values:
        raise SpecError("is no mapping", where=where, allowed=", ".join(_KEYS))
    axes = [[(key, choice) for choice in _choices(key, value, where)] for key, value in values.items()]
    return tuple(dict.fromkeys(_case(dict(combination), where) for combination in itertools.product(*axes)))


def _choices(key: object, value: object, where: str) -> list[Any]:
    if key not in _KEYS:
        raise SpecError(f"unknown key {key}", where=where, allowed=", ".join(_KEYS),
                        nearest=next(iter(difflib.get_close_matches(str(key), _KEYS, n=1)), ""))
    pair = key == "window" and isinstance(value, list) and all(isinstance(side, int) for side in value)
    choices = [value] if pair or not isinstance(value, list) else value
    for choice in choices:
        if key == "window":
            fine = (isinstance(choice, list) and len(choice) == 2
                    and all(type(side) is int and side >= -1 for side in choice))
            allowed = "[left, right], counts of keys or -1"
        elif key == "causal":
            fine, allowed = isinstance(choice, bool), "true, false"
        elif key == "dtype":
            fine, allowed = choice in DTYPES, ", ".join(DTYPES)
        else:
            fine, allowed = type(choice) is int and choice >= 1, "whole numbers from 1"
        if not fine:
            raise SpecError(f"{key} is {choice!r}", where=where, allowed=allowed)
    return choices


def _case(values: dict[str, Any], where: str) -> Case:
    for total, part, name in (("tokens", "seqlen_q", "batch"), ("hidden", "head_dim_qk", "num_heads_q")):
        if part not in values:
            raise SpecError(f"{part} is missing", where=where, allowed="whole numbers from 1")
        if (total in values) == (name in values):
            raise SpecError(f"gives {'both' if total in values else 'neither of'} {name} and {total}", where=where,
                            allowed="one of the two")
        if total in values:
            whole = values.pop(total)
            if whole % values[part]:
                raise SpecError(f"{total} {whole} is not a multiple of {part} {values[part]}", where=where,
                                allowed=f"{name} = {total} / {part} in whole numbers")
            values[name] = whole // values[part]
    for name, twin in (("seqlen_kv", "seqlen_q"), ("num_heads_kv", "num_heads_q"), ("head_dim_v", "head_dim_qk")):
        values.setdefault(name, values[twin])
    if values["num_heads_q"] % values["num_heads_kv"]:
        raise SpecError(f"num_heads_q {values['num_heads_q']} is not a multiple of num_heads_kv "
                        f"{values['num_heads_kv']}", where=where)
    if "window" in values:
        values["window"] = tuple(values["window"])
    return Case(**values)


def default_grid(family: str, pass_: str) -> str:
    path = ROOT / "benchmarks" / "grids" / f"{family}_{pass_}.yaml"
    if not path.is_file():
        raise SpecError(f"no default grid for {family} {pass_}", where="--problem-grid", next=(
            "give one, such as --problem-grid '{batch: 2, num_heads_q: 16, head_dim_qk: 128, seqlen_q: [2048, 8192]}'"))
    return str(path)


def variants_for(case: Case, specs: Iterable[Spec], archs: Sequence[str]) -> list[Spec]:
    """The dense variants that serve a case, for the first of `archs` that has any."""
    windowed = case.window != (-1, -1)
    fitting = [spec for spec in specs if spec.kv_layout == "dense" and spec.dtype == case.dtype
               and (spec.head_dim_qk, spec.head_dim_v) == (case.head_dim_qk, case.head_dim_v)
               and (spec.window if windowed else not spec.window and spec.causal == case.causal)]
    for arch in archs:
        found = [spec for spec in fitting if spec.arch == arch]
        if found:
            return found
    raise UnsupportedError(f"no variant serves {case.label}", where="bench", allowed=", ".join(archs) + ", dense",
                           next="flashgen list SPEC; or narrow the grid")


# -- timing

Call = Callable[[], object]
Run = Callable[[], float]  # one timing: milliseconds per call


class Timer(Protocol):
    def __call__(self, calls: Sequence[Call]) -> Run:
        """Prepares (captures, warms up) `calls`, one per set of inputs; the Run times them."""


class Refused(UnsupportedError):
    """An implementation does not serve a case; `what` says why."""


def sets_needed(bytes_per_set: int, l2_bytes: int) -> int:
    """Sets of inputs to rotate over, so that L2 holds nothing of a set when its turn comes again."""
    return min(max(1, math.ceil(2 * l2_bytes / bytes_per_set)), SETS_MAX)


def interleave(runs: Mapping[str, Run], rounds: int = ROUNDS, warmup: int = WARMUP_ROUNDS) -> dict[str, float]:
    """Median ms per call of each. Every round times each once, beginning with another one, so that slow changes of
    clock and temperature meet all of them alike."""
    names = list(runs)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(warmup + rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            elapsed = runs[name]()
            if number >= warmup:
                times[name].append(elapsed)
    return {name: statistics.median(values) for name, values in times.items()}


def row_of(case: Case, variant: str, medians: Mapping[str, float], refused: Mapping[str, str]) -> dict[str, Any]:
    """A row of the results. `ratio` is our speed over the best peer's, None without a peer."""
    ours = medians[OURS]
    peers = {name: _digits(ms) for name, ms in medians.items() if name != OURS}
    return {"case": {**asdict(case), "window": list(case.window), "variant": variant}, "ours_ms": _digits(ours),
            "peers": peers, "refused": dict(refused), "tflops": _digits(case.flops / ours / 1e9),
            "gbps": _digits(case.bytes / ours / 1e6), "ratio": _digits(min(peers.values()) / ours) if peers else None}


def _digits(value: float) -> float:
    """Five significant ones: more than two runs share."""
    return float(f"{value:.5g}")


def geomeans(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Our speed over each peer's, as the geometric mean over the rows that have it; `best` is the best of each row."""
    ratios: dict[str, list[float]] = {}
    for row in rows:
        for name, ms in row["peers"].items():
            ratios.setdefault(name, []).append(ms / row["ours_ms"])
        if row["peers"]:
            ratios.setdefault("best", []).append(min(row["peers"].values()) / row["ours_ms"])
    return {name: statistics.geometric_mean(values) for name, values in ratios.items()}


# -- results


def gpu_folder(name: str) -> str:
    """`NVIDIA H200` -> `h200`."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    return "-".join(word for word in words if word not in ("nvidia", "geforce", "tesla")) or "unknown"


def commit() -> str | None:
    """Of the checkout this runs from, with `-dirty` if it differs; None outside one."""
    try:
        answers = [subprocess.run(["git", "-C", str(ROOT), *command], capture_output=True, text=True, check=True).stdout
                   for command in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))]
    except (OSError, subprocess.SubprocessError):
        return None
    return answers[0].strip() + ("-dirty" if answers[1].strip() else "")


def document(facts: Mapping[str, Any], **contents: Any) -> dict[str, Any]:
    """The file: {gpu, driver, versions, commit, date, ...contents}."""
    now = datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0)
    return {**{key: facts[key] for key in ("gpu", "driver", "versions")}, "commit": commit(), "date": now.isoformat(),
            **contents}


def write_results(results: Mapping[str, Any], directory: str | os.PathLike[str], name: str) -> Path:
    """<directory>/<gpu>/<name>.json, replaced as a whole."""
    path = Path(directory) / gpu_folder(results["gpu"]) / f"{name}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    except OSError as err:
        raise EnvironmentError_(f"cannot be written ({err.strerror})", where=str(path), next="-o DIR") from err
    return path


class Device(Protocol):
    """What a run needs of the machine; bench_device.CudaDevice, or a stand-in in tests."""

    l2_bytes: int

    def facts(self) -> dict[str, Any]: ...
    def archs(self) -> Sequence[str]: ...
    def absent(self, peer: str) -> str | None: ...
    def inputs(self, case: Case, sets: int) -> Sequence[Any]: ...
    def ours(self, case: Case, spec: Spec, inputs: Sequence[Any]) -> Sequence[Call]: ...
    def peer(self, name: str, case: Case, inputs: Sequence[Any]) -> Sequence[Call]: ...
    def timer(self, calls: Sequence[Call]) -> Run: ...
    def release(self) -> None: ...


def bench(device: Device, specs: Sequence[Spec], cases: Sequence[Case], peers: Sequence[str], *, rounds: int = ROUNDS,
          progress: Callable[[int, str], None] = lambda done, what: None) -> dict[str, Any]:
    """All cases with all fitting variants: the document that write_results stores.

    A peer that is not installed is listed under `absent`, one that refuses a case under that row's `refused`.
    """
    absent = {name: reason for name in peers if (reason := device.absent(name)) is not None}
    present = [name for name in peers if name not in absent]
    work = [(case, spec) for case in cases for spec in variants_for(case, specs, device.archs())]
    rows = []
    for done, (case, spec) in enumerate(work):
        progress(done, case.label)
        rows.append(_measure(device, case, spec, present, rounds))
        device.release()
    progress(len(work), "")
    return document(device.facts(), absent=absent, rows=rows)


def _measure(device: Device, case: Case, spec: Spec, peers: Sequence[str], rounds: int) -> dict[str, Any]:
    inputs = device.inputs(case, sets_needed(case.bytes, device.l2_bytes))
    repeats = math.ceil(CALLS_PER_GRAPH / len(inputs))
    runs, refused = {OURS: device.timer([*device.ours(case, spec, inputs)] * repeats)}, {}
    for name in peers:
        try:
            runs[name] = device.timer([*device.peer(name, case, inputs)] * repeats)
        except Refused as err:
            refused[name] = err.what
    return row_of(case, f"{spec.variant}.{spec.arch}", interleave(runs, rounds), refused)
