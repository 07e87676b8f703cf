"""Build many variants: what the cache holds is taken from it, one miss compiles here, several in worker processes.

There is a worker for each variant, which compiles it for all of its archs. Workers are forks of this process, so that
they have every import and the compiler at hand: a fresh interpreter would take as long as a small kernel. They publish
into the cache themselves, and hand back their results through a pipe. A worker that dies takes only its own variant
with it. Since hits are found first, a second build starts no process.
"""
from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from flashgen.codegen.plan import Plan
from flashgen.codegen.source import Source
from flashgen.errors import FlashgenError
from flashgen.runtime.compile.cache import Cache, cache_key
from flashgen.runtime.compile.cubin import Resources
from flashgen.runtime.compile.entry import Entry

if TYPE_CHECKING:
    from flashgen.codegen.spec.spec import Spec  # pydantic is not needed to build

WORKER_MEMORY_BYTES = 512 << 20  # NVRTC peaks at 120 to 160 MB per process; the rest is room for larger kernels


@dataclass(frozen=True)
class BuildResult:
    """The outcome for one spec. Either `error` (FlashgenError.to_json plus its type) or the rest is set."""

    variant: str
    arch: str
    key: str | None = None
    path: Path | None = None  # the entry's folder, None if it could not be written
    hit: bool = False
    seconds: float = 0.0
    error: dict[str, Any] | None = None
    resources: Resources | None = None
    entry: Entry | None = field(default=None, repr=False, compare=False)

    def to_json(self) -> dict[str, Any]:
        resources = self.resources.to_dict() if self.resources else None
        return {"variant": self.variant, "arch": self.arch, "key": self.key, "path": str(self.path or "") or None,
                "hit": self.hit, "seconds": round(self.seconds, 4), "error": self.error, "resources": resources}


Progress = Callable[[BuildResult, int, int], None]  # (result, results so far, results in all)


class Rendered(NamedTuple):
    """A kernel before it is compiled: its plan, its CUDA text and its key in the cache."""

    plan: Plan
    text: str
    key: str


@dataclass(frozen=True)
class _Miss:
    plan: Plan
    source: Source
    key: str
    seconds: float  # spent on it so far

    @property
    def text(self) -> str:
        return self.source.text


class _Report:
    """Results by position in `specs`; every one is announced as it comes in."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.results: dict[int, BuildResult] = {}
        self._total, self._progress = total, progress

    def add(self, index: int, result: BuildResult) -> None:
        self.results[index] = result
        if self._progress is not None:
            self._progress(result, len(self.results), self._total)

    @property
    def failed(self) -> bool:
        return any(result.error for result in self.results.values())


def build_specs(specs: Sequence[Spec], cache: Cache | None = None, jobs: int | None = None,
                progress: Progress | None = None, keep_going: bool = True,
                before: Callable[[list[Rendered]], object] | None = None) -> list[BuildResult]:
    """One result per spec, in order.

    What is wrong with a single spec (it does not lower, does not compile, its worker dies) is the `error` of its
    result. `jobs` worker processes at most, by default as many as there are CPUs and memory for. With keep_going
    False the first failure stops the rest. `progress` is called in this thread. `before` gets all kernels ahead of the
    first that is compiled, unless one has no source. Raises EnvironmentError_ without NVRTC.
    """
    cache = cache if cache is not None else Cache()
    report, misses = _Report(len(specs), progress), {}
    for index, spec in enumerate(specs):
        if report.failed and not keep_going:
            break
        found = _prepare(spec, cache)
        if isinstance(found, BuildResult):
            report.add(index, found)
        else:
            misses[index] = found
    if before is not None and not report.failed:
        found_or_not = [misses.get(index) or report.results[index].entry for index in range(len(specs))]
        before([Rendered(kernel.plan, kernel.text, kernel.key) for kernel in found_or_not if kernel])
    groups: dict[str, dict[str, list[int]]] = {}  # variant -> key -> positions (a spec may be listed twice)
    for index, miss in misses.items():
        groups.setdefault(miss.plan.variant, {}).setdefault(miss.key, []).append(index)
    if keep_going or not report.failed:
        if sum(len(keys) for keys in groups.values()) > 1:
            _build_in_workers(groups, misses, cache, jobs or jobs_default(), report, keep_going)
        else:
            for index, miss in misses.items():
                report.add(index, _compile(cache, miss))
    for index, spec in enumerate(specs):
        if index not in report.results:
            report.add(index, _failure(spec.variant, spec.arch, "not built: an earlier variant failed"))
    return [report.results[index] for index in range(len(specs))]


def rendered(spec: Spec) -> Rendered:
    """The kernel of one spec. Raises PlanError, TemplateError, and EnvironmentError_ without NVRTC."""
    from flashgen.codegen.render import plan_and_source

    plan, source = plan_and_source(spec)
    return Rendered(plan, source.text, cache_key(source, plan))


def jobs_default() -> int:
    """Workers that the CPUs of this process and the memory that is free allow; at least one."""
    return max(1, min(len(os.sched_getaffinity(0)), _memory_available_bytes() // WORKER_MEMORY_BYTES))


def _memory_available_bytes() -> int:
    """Free memory of the machine, or what the container's limit leaves, whichever is less."""
    meminfo = Path("/proc/meminfo").read_text()
    free = int(meminfo.partition("MemAvailable:")[2].split()[0]) * 1024
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = re.search(r"^anon (\d+)", Path("/sys/fs/cgroup/memory.stat").read_text(), re.MULTILINE)
    except OSError:
        return free
    return min(free, int(limit) - int(used[1])) if used and limit.isdigit() else free


def _prepare(spec: Spec, cache: Cache) -> BuildResult | _Miss:
    """The result if it is known without compiling: a cache hit or a spec that does not lower."""
    from flashgen.codegen.render import plan_and_source  # workers and bundles never render

    start = time.perf_counter()
    try:
        plan, source = plan_and_source(spec)
    except FlashgenError as err:
        return _failure(spec.variant, spec.arch, err, seconds=time.perf_counter() - start)
    entry = cache.get(plan, source)
    seconds = time.perf_counter() - start
    return _success(entry, seconds) if entry else _Miss(plan, source, cache_key(source, plan), seconds)


def _compile(cache: Cache, miss: _Miss) -> BuildResult:
    start = time.perf_counter() - miss.seconds
    try:
        entry = cache.build(miss.plan, miss.source)
    except FlashgenError as err:
        return _failure(miss.plan.variant, miss.plan.target, err, miss.key, time.perf_counter() - start)
    return _success(entry, time.perf_counter() - start)


def _success(entry: Entry, seconds: float) -> BuildResult:
    return BuildResult(entry.plan.variant, entry.plan.target, entry.key, entry.path, entry.hit, seconds, None,
                       entry.cubin.resources, entry)


def _failure(variant: str, arch: str, error: FlashgenError | str, key: str | None = None, seconds: float = 0.0,
             details: str = "") -> BuildResult:
    if isinstance(error, str):
        error = FlashgenError(error, where=f"{variant}.{arch}", details=details)
    return BuildResult(variant, arch, key, seconds=seconds, error=error_json(error))


def error_json(error: FlashgenError) -> dict[str, Any]:
    """An error as data: its fields, its class and the exit code of the command line."""
    return {"type": type(error).__name__, "exit_code": error.exit_code, **error.to_json()}


# -- many: worker processes

_Group = dict[str, list[int]]  # key -> positions in `specs`


def _build_in_workers(groups: dict[str, _Group], misses: dict[int, _Miss], cache: Cache, jobs: int, report: _Report,
                      keep_going: bool) -> None:
    """Compile every group in its own process, at most `jobs` at a time; report each as it ends."""
    import multiprocessing
    from multiprocessing import connection

    fork, waiting = multiprocessing.get_context("fork"), [*groups.values()][::-1]
    running: dict[Any, tuple[Any, Any, _Group]] = {}  # (worker, log, group) by the pipe of results
    try:
        while (waiting or running) and (keep_going or not report.failed):
            while waiting and len(running) < jobs:
                keys, (results, into) = waiting.pop(), fork.Pipe(duplex=False)
                log = tempfile.TemporaryFile()  # noqa: SIM115  _collect closes it
                work = {key: misses[positions[0]] for key, positions in keys.items()}
                process = fork.Process(target=_work, args=(cache, log, work, into), daemon=True)
                process.start()
                into.close()  # the worker has the only one: when it dies, the pipe ends
                running[results] = process, log, keys
            for ended in connection.wait(list(running)):
                _collect(_received(ended), *running.pop(ended), misses, cache, report)
    finally:
        for process, *_ in running.values():
            process.terminate()
        for process, *_ in running.values():
            process.join()


def _work(cache: Cache, log: IO[bytes], work: dict[str, _Miss], into: Any) -> None:
    """A worker: compiles, and sends what happened to each key. What it says goes to `log`."""
    for standard in (1, 2):
        os.dup2(log.fileno(), standard)
    sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115  to the end
    into.send({key: _compile(cache, miss) for key, miss in work.items()})


def _received(results: Any) -> dict[str, BuildResult]:
    try:
        found: dict[str, BuildResult] = results.recv()
        return found
    except (EOFError, OSError):  # the worker died
        return {}


def _collect(results: dict[str, BuildResult], process: Any, log: IO[bytes], keys: _Group, misses: dict[int, _Miss],
             cache: Cache, report: _Report) -> None:
    """Report what a worker found, or its death."""
    process.join()
    log.seek(0)
    said = log.read().decode(errors="replace").strip()
    log.close()
    for key, positions in keys.items():
        found = results.get(key)
        if found is not None and found.entry is not None:
            cache.remember(found.entry)
            if found.path is None and cache.directory is not None:  # the worker's own warning went to its log
                cache.warn_once(f"{cache.directory} cannot be written")
        for index in positions:
            plan = misses[index].plan
            report.add(index, found or _failure(plan.variant, plan.target, _death(process.exitcode), key, details=said))


def _death(code: int) -> str:
    """What to say of a worker without results. `code` as multiprocessing has it: a signal is negative."""
    if code >= 0:
        return f"the build worker left no result and exit status {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
    hint = "; out of memory? Fewer jobs need less" if name == "SIGKILL" else ""
    return f"the build worker was ended by {name}{hint}"
