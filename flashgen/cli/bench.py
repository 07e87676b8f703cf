"""`flashgen bench`."""
from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashgen.cli.common import Archs, Output, Table, Variants, command, select
from flashgen.cli.progress import loading_torch, progress
from flashgen.errors import EnvironmentError_, SpecError, UnsupportedError

if TYPE_CHECKING:
    from flashgen.codegen.spec.spec import Spec

ALL_PEERS = "sdpa-fa2,sdpa-cudnn,flex,fa3,fa3-split,torch-varlen"  # bench_device.PEERS, which needs torch
PURPOSE = ("bench times kernels", "flashgen explain gives the roofline without a GPU")


def register(app: typer.Typer) -> None:
    command(app, bench)


def bench(specs: Annotated[list[str] | None, typer.Argument(metavar="[SPEC...]", help=(
              "Spec files, or names of shipped ones; none for a grid that lists variants."))] = None,
          arch: Archs = None, variant: Variants = None,
          peers: Annotated[str, typer.Option("--peers", metavar="NAMES", help=(
              "Comma-separated; '' for none. By default those of attention, flashmla for decodes."))] = ALL_PEERS,
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
    from flashgen.runtime.ops.mla_decode.bench import PEERS as MLA_PEERS

    if not specs:
        return _bench_variants(problem_grid, peers, timer, out, rounds=rounds, given_commit=given_commit)
    chosen = select(specs, arch, variant)
    decodes = chosen[0].family == "flashmla"
    names = _names(peers, tuple(MLA_PEERS) if decodes else ALL_PEERS.split(","))
    need_device(*PURPOSE)
    with loading_torch():
        from flashgen.runtime.measure.device import CudaDevice
    device = CudaDevice(timer, data)
    if overhead:
        return _overhead(device, out, given_commit)
    run = _bench_mla if decodes else _bench
    return run(device, chosen, names, problem_grid, out, rounds=rounds, given_commit=given_commit)


def _bench_mla(device: Any, specs: Sequence[Spec], peers: list[str], grid: str | None, out: Path, **options: Any
               ) -> Output:
    from flashgen.runtime.measure.bench import results_name, write_results
    from flashgen.runtime.ops.attention.cases import default_grid
    from flashgen.runtime.ops.mla_decode.bench import bench as run
    from flashgen.runtime.ops.mla_decode.bench import load_cases

    if device.data != "normal":
        raise UnsupportedError(f"data {device.data}", where="--data", allowed="normal, for decodes")
    cases = load_cases(grid or default_grid("flashmla", "decode"))
    with progress("timing", len(cases)) as step:
        results = run(device, specs, cases, peers, progress=step, **options)
    path = write_results(results, out, results_name("flashmla", "decode", grid, "normal"))
    return Output(results, [*mla_tables(results, peers), f"wrote {path}"])


def mla_tables(results: dict[str, Any], peers: Sequence[str]) -> list[str | Table]:
    """The rows beside the marks and the peers, the means, and who is missing."""
    from flashgen.runtime.ops.mla_decode.bench import MlaCase, geomeans_by_heads

    def text(value: float | None, digits: int) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    names, rows = [name for name in peers if name not in results["absent"]], []
    for row in results["rows"]:
        case = MlaCase(**{key: value for key, value in row["case"].items() if key != "variant"})
        beside = [f"{row['peers'][name]:.4f}" if name in row["peers"] else "refused" for name in names]
        rows.append((row["case"]["variant"], case.label, f"{row['ours_ms']:.4f}", f"{row['tflops']:.0f}",
                     f"{row['gbps']:.0f}", text(row["mark_ms"], 4), text(row["speed"], 3), *beside,
                     *([text(row["ratio"], 3)] if names else [])))
    columns = ("variant", "case", ">ms", ">TFLOP/s", ">GB/s", ">mark ms", ">speed / mark",
               *(f">{name} ms" for name in names), *([">speed / peer"] if names else []))
    parts: list[str | Table] = [
        f"{results['gpu']}, driver {results['driver']}; marks: {results['marks'] or 'none for this card'}",
        Table(columns, rows)]
    for figure, over in (("speed", "the marks"), ("ratio", ", ".join(names))):
        if means := geomeans_by_heads(results["rows"], figure):
            each = ", ".join(f"{name} {mean:.3f}" for name, mean in means.items())
            parts.append(f"speed over {over}, geometric mean: {each}")
    return parts + _missing(results)


def _missing(results: dict[str, Any]) -> list[str]:
    """The peers that are absent, and what the others refused."""
    reasons = {f"refused: {name}: {why}" for row in results["rows"] for name, why in row["refused"].items()}
    return [*(f"absent: {name}: {reason}" for name, reason in results["absent"].items()), *sorted(reasons)]


def _names(peers: str, known: Sequence[str]) -> list[str]:
    """All that are known where none are named."""
    names = list(known) if peers == ALL_PEERS else [name.strip() for name in peers.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise UnsupportedError(f"no peer {name}", where="--peers", allowed=", ".join(known),
                                   nearest=next(iter(difflib.get_close_matches(name, known, n=1)), ""))
    return names


def _bench_variants(grid: str | None, peers: str, timer: str, out: Path, **options: Any) -> Output:
    """A grid that lists variants, each beside FlexAttention and our own built-in masks."""
    from flashgen.runtime.launch.driver import need_device
    from flashgen.runtime.measure.bench import write_results
    from flashgen.runtime.ops.attention.variants import PEERS, bench_variants, has_variants, load_variants, results_stem

    if grid is None or not has_variants(grid):
        raise SpecError("no SPEC, and no grid that lists variants", where="bench",
                        allowed="flashgen bench SPEC..., or --problem-grid GRID with a key `variants`",
                        nearest="--problem-grid benchmarks/grids/fa3_variants.yaml")
    names = _names(peers, PEERS)
    cases = load_variants(grid)
    need_device(*PURPOSE)
    with loading_torch():
        from flashgen.runtime.ops.attention.flex import VariantDevice
    device = VariantDevice(grid, timer)
    with progress("timing", len(cases)) as step:
        results = bench_variants(device, cases, names, timer=timer, progress=step, **options,
                                 store=lambda found: write_results(found, out, results_stem(grid)))
    path = write_results(results, out, results_stem(grid))
    return Output(results, [*variant_tables(results, names), f"wrote {path}"])


def variant_tables(results: dict[str, Any], peers: Sequence[str]) -> list[str | Table]:
    """The rows, and who is missing."""
    names = [name for name in peers if name not in results["absent"]]
    rows = [(row["name"], "B{batch} S{seqlen_q}".format(**row["case"]), row["timer"], f"{row['ours_ms']:.4f}",
             f"{row['tflops']:.0f}",
             *(cell for name in names for cell in (
                 (f"{row['peers'][name]:.4f}", f"{row['speed'][name]:.3f}") if name in row["peers"] else ("", ""))))
            for row in results["rows"]]
    columns = ("variant", "case", "timer", ">ms", ">TFLOP/s",
               *(column for name in names for column in (f">{name} ms", ">speed")))
    reasons = {f"refused: {row['name']}: {name}: {why}" for row in results["rows"]
               for name, why in row["refused"].items() if why != "no built-in mask gives this answer"}
    return [f"{results['gpu']}, driver {results['driver']}; seconds: {results['seconds']}", Table(columns, rows),
            *(f"absent: {name}: {reason}" for name, reason in results["absent"].items()), *sorted(reasons)]


def _bench(device: Any, specs: Sequence[Spec], peers: list[str], grid: str | None, out: Path, **options: Any) -> Output:
    from flashgen.runtime.measure.bench import bench as run
    from flashgen.runtime.measure.bench import results_name, write_results
    from flashgen.runtime.measure.plot import draw
    from flashgen.runtime.ops.attention.cases import default_grid, load_grid

    family, pass_ = specs[0].family, specs[0].pass_
    cases = load_grid(grid or default_grid(family, pass_))
    with progress("timing", len(cases)) as step:
        results = run(device, specs, cases, peers, progress=step, **options)
    path = write_results(results, out, results_name(family, pass_, grid, device.data))
    notes = [f"wrote {path}"]
    try:
        notes.append(f"wrote {draw(results, path.with_suffix('.png'))}")
    except EnvironmentError_ as err:  # the figures are there: a picture is an extra
        notes.append(f"warning: {err}")
    return Output(results, [*tables(results, peers), *notes])


def tables(results: dict[str, Any], peers: Sequence[str]) -> list[str | Table]:
    """The rows, the means, and who is missing."""
    from flashgen.runtime.measure.bench import case_of

    names = [name for name in peers if name not in results["absent"]]
    rows = [(row["case"]["variant"], case_of(row).shape, f"{row['ours_ms']:.4f}", f"{row['tflops']:.0f}",
             f"{row['gbps']:.0f}",
             *(f"{row['peers'][name]:.4f}" if name in row["peers"] else "refused" for name in names),
             "" if row["ratio"] is None else f"{row['ratio']:.3f}") for row in results["rows"]]
    columns = ("variant", "case", ">ms", ">TFLOP/s", ">GB/s", *(f">{name} ms" for name in names), ">speed / best peer")
    data = "" if results["data"] == "normal" else f", {results['data']} data"
    parts: list[str | Table] = [f"{results['gpu']}, driver {results['driver']}{data}", Table(columns, rows)]
    return parts + _means(results["rows"]) + _missing(results)


def _means(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Over all rows, by head dims where there are several, and the row that is worst for us."""
    from flashgen.runtime.measure.bench import case_of, geomeans, geomeans_by_head_dims, least

    def text(means: dict[str, float]) -> str:
        return ", ".join(f"{name} {mean:.3f}" for name, mean in means.items())

    worst, groups = least(rows), geomeans_by_head_dims(rows)
    if worst is None:
        return []
    return [f"speed over each peer, geometric mean: {text(geomeans(rows))}",
            *(f"  {name}: {text(means)}" for name, means in groups.items() if means and len(groups) > 1),
            f"least over the best peer: {worst['ratio']:.3f}, {case_of(worst).label}"]


def _overhead(device: Any, out: Path, given_commit: str | None) -> Output:
    from flashgen.runtime.measure.bench import document, write_results
    from flashgen.runtime.measure.device import measure_overhead

    found = measure_overhead()
    results = document(device.facts(), given_commit, overhead=found)
    path = write_results(results, out, "overhead")
    empty = found["empty_op_us"]
    return Output(results, [
        f"{results['gpu']}, host time per warm call, and beyond an empty torch op ({empty:.2f} us):",
        *(f"  {name.removesuffix('_us'):<18} {us:6.2f} us  {us - empty:6.2f} us" for name, us in found.items()
          if name != "empty_op_us"),
        f"wrote {path}"])
