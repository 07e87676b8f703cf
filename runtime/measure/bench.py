"""`flashgen bench`: ours and the peers on the same inputs, interleaved in one run. Medians, figures, JSON.

Nothing here touches a GPU: timers come from device.py; cases, inputs and peers come from an operation (Bench in
suite.py); tests bring their own.
"""
from __future__ import annotations

import datetime
import json
import math
import os
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from flashgen.errors import EnvironmentError_, FlashgenError, UnsupportedError
from flashgen.runtime.measure.grid import ROOT, is_inline

if TYPE_CHECKING:
    from flashgen.codegen.spec.spec import Spec
    from flashgen.runtime.measure.suite import Bench, Job

ROUNDS = 15             # each implementation is timed once per round
WARMUP_ROUNDS = 3       # clocks and caches settle
CALLS_PER_GRAPH = 8     # so that the gap between two replays does not count
SETS_MAX = 2048         # of inputs: problems so small that more would be needed are bound by launches anyway
OURS = "flashgen"
DATA = ("normal", "growing", "wide")  # N(0, 1); keys that grow along a sequence, and scores with them; large scores


# -- timing

Call = Callable[[], object]
Run = Callable[[], float]  # one timing: milliseconds per call


@dataclass(frozen=True)
class Peer:
    """Another implementation. `start` takes a job of the operation and gives a call for each set of its inputs, once
    the first has run; Refused where it does not serve the case."""

    start: Callable[[Any], Sequence[Call]]
    versions: tuple[tuple[str, str | None], ...] = ()  # (package, version); None: a folder that is no package


class Refused(UnsupportedError):
    """An implementation does not serve a case; `what` says why."""


def sets_needed(bytes_per_set: int, l2_bytes: int) -> int:
    """Sets of inputs to rotate over, so that L2 holds nothing of a set when its turn comes again."""
    return min(max(1, math.ceil(2 * l2_bytes / bytes_per_set)), SETS_MAX)


def repeated(calls: Sequence[Call]) -> list[Call]:
    """The calls, one for each set of inputs, as often as fills a graph."""
    return [*calls] * math.ceil(CALLS_PER_GRAPH / len(calls))


@contextmanager
def own_words() -> Iterator[None]:
    """Whatever a library raises in here is Refused, in its words and those of the cause that it names."""
    try:
        yield
    except FlashgenError:
        raise
    except Exception as err:
        words = [str(one).strip().partition("\n")[0] for one in (err, err.__cause__) if one is not None]
        raise Refused(": ".join([type(err).__name__, *words])) from err


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


def figures(medians: Mapping[str, float], refused: Mapping[str, str], flops: int, moved_bytes: int) -> dict[str, Any]:
    """What every row of the results has. `ratio` is our speed over the best peer's, None without a peer."""
    ours = medians[OURS]
    peers = {name: digits(ms) for name, ms in medians.items() if name != OURS}
    return {"ours_ms": digits(ours), "peers": peers, "refused": dict(refused), "tflops": digits(flops / ours / 1e9),
            "gbps": digits(moved_bytes / ours / 1e6), "ratio": digits(min(peers.values()) / ours) if peers else None}


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
    """What a run needs of the machine; device.CudaDevice, or a stand-in in tests."""

    l2_bytes: int
    num_sms: int
    timer: str   # of TIMERS
    data: str    # of DATA: what inputs are drawn
    place: str   # where tensors go, as torch names it

    def facts(self) -> dict[str, Any]: ...
    def archs(self) -> Sequence[str]: ...
    def timed(self, timer: str, calls: Sequence[Call]) -> Run: ...
    def release(self) -> None: ...


def bench(device: Device, suite: Bench, specs: Sequence[Spec], cases: Sequence[Any], peers: Sequence[str], *,
          rounds: int = ROUNDS, progress: Callable[[int, str], None] = lambda done, what: None,
          store: Callable[[dict[str, Any]], object] = lambda results: None, given_commit: str | None = None
          ) -> dict[str, Any]:
    """All cases with all fitting variants: the document that write_results stores. `store` gets it after every row.

    A peer that is not installed is listed under `absent`, one that refuses a case under that row's `refused`. One that
    is timed may add its package to `versions`.
    """
    timed, found, absent = suite.timed(), {}, {}
    for name in peers:
        try:
            found[name] = timed.find(name)
        except Refused as err:
            absent[name] = err.what
    facts = device.facts()
    facts["versions"] = {**facts["versions"], **{name: text for peer in found.values() for name, text in peer.versions}}
    work, start = suite.work(cases, specs, device), time.monotonic()
    rows: list[dict[str, Any]] = []
    suite.warm(cases, [*found])
    seconds = {"compiling": round(time.monotonic() - start, 1)}

    def results() -> dict[str, Any]:
        return document(facts, given_commit, **suite.notes(device, seconds), absent=absent, rows=rows)

    for done, (case, spec) in enumerate(work):
        progress(done, case.label)
        job = timed.job(case, spec, timed.inputs(device, case, spec))
        rows.append(_measure(device, suite, job, found, rounds))
        del job  # whose tensors the next case may need the room of
        device.release()
        seconds["all"] = round(time.monotonic() - start, 1)
        store(results())
    progress(len(work), "")
    return results()


def _measure(device: Device, suite: Bench, job: Job, peers: Mapping[str, Peer], rounds: int) -> dict[str, Any]:
    """A row. The graphs, which hold tensors, end with this call."""
    calls, refused = {OURS: job.ours()}, {}
    for name, peer in peers.items():
        try:
            with own_words():
                calls[name] = peer.start(job)
        except Refused as err:
            refused[name] = err.what
    timer, runs = _runs(device, calls, refused, device.timer, suite.falls_back)
    return suite.row(job, interleave(runs, rounds), refused, timer)


def _runs(device: Device, calls: Mapping[str, Sequence[Call]], refused: dict[str, str], timer: str, falls_back: bool
          ) -> tuple[str, dict[str, Run]]:
    """(the timer, what times each). Where no graph holds a peer's calls, the peer is refused, or, with `falls_back`,
    all are timed as plain calls."""
    runs = {}
    for name, own in calls.items():
        try:
            with own_words() if name != OURS else nullcontext():
                runs[name] = device.timed(timer, repeated(own))
        except Refused as err:
            if falls_back and timer != "events":
                return _runs(device, calls, refused, "events", False)
            if name == OURS:
                raise
            refused[name] = err.what
    return timer, runs
