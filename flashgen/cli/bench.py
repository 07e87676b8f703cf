"""`flashgen bench`."""
from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashgen.cli.common import Archs, Output, Table, Variants, command, select
from flashgen.cli.progress import loading_torch, progress
from flashgen.errors import EnvironmentError_, UnsupportedError

if TYPE_CHECKING:
    from flashgen.codegen.spec.spec import Spec
    from flashgen.runtime.measure.suite import Bench

ALL_PEERS = "sdpa-fa2,sdpa-cudnn,flex,fa3,fa3-split,torch-varlen"  # AttentionBench.peers
PURPOSE = ("bench times kernels", "flashgen explain gives the roofline without a GPU")


def register(app: typer.Typer) -> None:
    command(app, bench)


def bench(specs: Annotated[list[str] | None, typer.Argument(metavar="[SPEC...]", help=(
              "Spec files, or names of shipped ones; none for a grid that lists variants."))] = None,
          arch: Archs = None, variant: Variants = None,
          peers: Annotated[str, typer.Option("--peers", metavar="NAMES", help=(
              "Comma-separated; '' for none. By default all that know the operation."))] = ALL_PEERS,
          problem_grid: Annotated[str | None, typer.Option("--problem-grid", metavar="GRID", help=(
              "A YAML file, or text such as '{batch: 2, num_heads_q: 16, head_dim_qk: 128, seqlen_q: [2048, 8192]}'; "
              "by default benchmarks/grids/<family>_<pass>.yaml of the first spec."))] = None,
          data: Annotated[str, typer.Option("--data", help="normal, growing (along the keys) or wide scores.")] = (
              "normal"),
          rounds: Annotated[int, typer.Option("--rounds", min=1, metavar="N", help="Timings behind each median.")] = 15,
          timer: Annotated[str, typer.Option("--timer", help="graph (CUDA graph replay) or events.")] = "graph",
          given_commit: Annotated[str | None, typer.Option("--commit", envvar="FLASHGEN_COMMIT", metavar="HASH", help=(
              "For the results, where git is absent."))] = None,
          overhead: Annotated[bool, typer.Option("--overhead", help="Host time per call instead.")] = False,
          out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Folder of the results.")] = Path(
              "benchmarks/results")) -> Output:
    """Time kernels against peers on this machine's GPU; write JSON and a picture below DIR/<gpu>.

    Decodes are timed beside FlashMLA, and compared with the marks in benchmarks/marks."""
    from flashgen.runtime.launch.driver import need_device
    from flashgen.runtime.measure.bench import bench as run
    from flashgen.runtime.measure.bench import write_results

    suite, chosen = _suite(specs, arch, variant)
    names = _names(peers, suite.peers)
    if data not in suite.data:
        raise UnsupportedError(f"data {data}", where="--data", allowed=", ".join(suite.data))
    cases = () if overhead else suite.load(problem_grid, chosen)
    need_device(*PURPOSE)
    with loading_torch():
        from flashgen.runtime.measure.device import CudaDevice
    device = CudaDevice(timer, data)
    if overhead:
        return _overhead(device, out, given_commit)
    stem = suite.stem(problem_grid, data, chosen)

    def store(results: dict[str, Any]) -> Path:
        return write_results(results, out, stem)

    with progress("timing", len(cases)) as step:
        results = run(device, suite, chosen, cases, names, rounds=rounds, progress=step, given_commit=given_commit,
                      **({"store": store} if suite.keeps_rows else {}))
    path = store(results)
    return Output(results, [*tables(suite, results, names), f"wrote {path}",
                            *(_picture(suite, results, path) if suite.picture else [])])


def _suite(specs: list[str] | None, arch: list[str] | None, variant: list[str] | None) -> tuple[Bench, list[Spec]]:
    """The bench of the operation that the first spec answers; without specs, that of a grid which lists variants."""
    if not specs:
        from flashgen.runtime.ops.attention.variants import BENCH

        return BENCH, []
    from flashgen.runtime.ops.registry import bench_of

    chosen = select(specs, arch, variant)
    return bench_of(chosen[0]), chosen


def _names(peers: str, known: Sequence[str]) -> list[str]:
    """All that are known where none are named."""
    names = list(known) if peers == ALL_PEERS else [name.strip() for name in peers.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise UnsupportedError(f"no peer {name}", where="--peers", allowed=", ".join(known),
                                   nearest=next(iter(difflib.get_close_matches(name, known, n=1)), ""))
    return names


def tables(suite: Bench, results: dict[str, Any], peers: Sequence[str]) -> list[str | Table]:
    """The rows, the means, the peers that are absent, and what the others refused."""
    names = [name for name in peers if name not in results["absent"]]
    columns, rows = suite.columns(names), results["rows"]
    reasons = {f"refused: {text}" for row in rows for text in suite.refusals(row)}
    return [f"{results['gpu']}, driver {results['driver']}{suite.heading(results)}",
            Table(tuple(column.title for column in columns),
                  [tuple(column.cell(row) for column in columns) for row in rows]),
            *suite.means(rows, names), *(f"absent: {name}: {why}" for name, why in results["absent"].items()),
            *sorted(reasons)]


def _picture(suite: Bench, results: dict[str, Any], path: Path) -> list[str]:
    from flashgen.runtime.measure.plot import draw

    try:
        return [f"wrote {draw(suite, results, path.with_suffix('.png'))}"]
    except EnvironmentError_ as err:  # the figures are there: a picture is an extra
        return [f"warning: {err}"]


def _overhead(device: Any, out: Path, given_commit: str | None) -> Output:
    from flashgen.runtime.measure.bench import document, write_results
    from flashgen.runtime.measure.overhead import measure_overhead

    found = measure_overhead()
    results = document(device.facts(), given_commit, overhead=found)
    path = write_results(results, out, "overhead")
    empty = found["empty_op_us"]
    return Output(results, [
        f"{results['gpu']}, host time per warm call, and beyond an empty torch op ({empty:.2f} us):",
        *(f"  {name.removesuffix('_us'):<18} {us:6.2f} us  {us - empty:6.2f} us" for name, us in found.items()
          if name != "empty_op_us"),
        f"wrote {path}"])
