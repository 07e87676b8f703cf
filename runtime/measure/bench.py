"""`flashgen bench`: ours and the peers on the same inputs, interleaved in one run. Medians, figures, JSON.

Nothing here touches a GPU: timers, inputs and peers come from device.py, and tests bring their own.
"""
from __future__ import annotations

import datetime
import json
import math
import os
import re
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from flashgen.errors import EnvironmentError_, UnsupportedError
from flashgen.runtime.ops.attention.cases import ROOT, Case, is_inline, variants_for

if TYPE_CHECKING:
    from flashgen.codegen.spec.spec import Spec

ROUNDS = 15             # each implementation is timed once per round
WARMUP_ROUNDS = 3       # clocks and caches settle
CALLS_PER_GRAPH = 8     # so that the gap between two replays does not count
SETS_MAX = 2048         # of inputs: problems so small that more would be needed are bound by launches anyway
OURS = "flashgen"
DATA = ("normal", "growing", "wide")  # N(0, 1); keys that grow along a sequence, and scores with them; large scores


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
    """Median ms per call of each. Every round times each once, beginning with another one and in either direction, so
    that slow changes of clock and temperature meet all alike, and none always comes after the one that heats most."""
    names = list(runs)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(warmup + rounds):
        first = number % len(names)
        order = names[first:] + names[:first]
        for name in order[::-1] if number // len(names) % 2 else order:
            elapsed = runs[name]()
            if number >= warmup:
                times[name].append(elapsed)
    return {name: statistics.median(values) for name, values in times.items()}


def row_of(case: Case, variant: str, medians: Mapping[str, float], refused: Mapping[str, str]) -> dict[str, Any]:
    """A row of the results. `ratio` is our speed over the best peer's, None without a peer."""
    ours = medians[OURS]
    peers = {name: digits(ms) for name, ms in medians.items() if name != OURS}
    values = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(case).items()}
    return {"case": {**values, "variant": variant}, "ours_ms": digits(ours),
            "peers": peers, "refused": dict(refused), "tflops": digits(case.flops / ours / 1e9),
            "gbps": digits(case.bytes / ours / 1e6), "ratio": digits(min(peers.values()) / ours) if peers else None}


def case_of(row: Mapping[str, Any]) -> Case:
    """The case of a row, also of one that was read from JSON."""
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value
                              for key, value in row["case"].items() if key != "variant"}
    return Case(**values)


def digits(value: float) -> float:
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


def geomeans_by_head_dims(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """geomeans() of the rows of each pair of head dims, named as in Case.head_dims."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(case_of(row).head_dims, []).append(row)
    return {name: geomeans(members) for name, members in groups.items()}


def least(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The row in which we do worst beside the best peer."""
    return min((row for row in rows if row["ratio"] is not None), key=lambda row: row["ratio"], default=None)


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


def document(facts: Mapping[str, Any], given_commit: str | None = None, **contents: Any) -> dict[str, Any]:
    """The file: {gpu, driver, versions, commit, date, ...contents}. `given_commit`: where no checkout can be asked."""
    now = datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0)
    return {**{key: facts[key] for key in ("gpu", "driver", "versions")}, "commit": given_commit or commit(),
            "date": now.isoformat(), **contents}


def results_name(family: str, pass_: str, grid: str | None, data: str) -> str:
    """Of the file, without its ending: grids of one family whose file names begin with <family>_<pass> have one each,
    and so has data that is not "normal"."""
    name, stem = f"{family}_{pass_}", "" if grid is None or is_inline(grid) else Path(grid).stem
    words = [stem if stem.startswith(f"{name}_") else name, *([data] if data != "normal" else [])]
    return "-".join(words).replace("_", "-")


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
    num_sms: int
    data: str  # one of DATA: what inputs() draws

    def facts(self) -> dict[str, Any]: ...
    def archs(self) -> Sequence[str]: ...
    def absent(self, peer: str) -> str | None: ...
    def inputs(self, case: Case, sets: int) -> Sequence[Any]: ...
    def ours(self, case: Case, spec: Spec, inputs: Sequence[Any]) -> Sequence[Call]: ...
    def peer(self, name: str, case: Case, inputs: Sequence[Any]) -> Sequence[Call]: ...
    def timer(self, calls: Sequence[Call]) -> Run: ...
    def release(self) -> None: ...


def bench(device: Device, specs: Sequence[Spec], cases: Sequence[Case], peers: Sequence[str], *, rounds: int = ROUNDS,
          progress: Callable[[int, str], None] = lambda done, what: None,
          given_commit: str | None = None) -> dict[str, Any]:
    """All cases with all fitting variants: the document that write_results stores.

    A peer that is not installed is listed under `absent`, one that refuses a case under that row's `refused`.
    """
    absent = {name: reason for name in peers if (reason := device.absent(name)) is not None}
    present = [name for name in peers if name not in absent]
    work = [(case, spec) for case in cases for spec in variants_for(case, specs, device.archs(), device.num_sms)]
    rows = []
    for done, (case, spec) in enumerate(work):
        progress(done, case.label)
        rows.append(_measure(device, case, spec, present, rounds))
        device.release()
    progress(len(work), "")
    return document(device.facts(), given_commit, data=device.data, absent=absent, rows=rows)


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
