"""`flashgen tune`."""
from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashgen.cli.common import Archs, Output, SpecArgument, Table, Variants, command, select
from flashgen.cli.progress import loading_torch, progress
from flashgen.errors import UnsupportedError, VerifyError

if TYPE_CHECKING:
    from flashgen.codegen.explain.candidates import Candidates, Dropped
    from flashgen.codegen.spec.spec import Spec
    from flashgen.runtime.measure.tune import Fault, Tuning


def register(app: typer.Typer) -> None:
    command(app, tune)


def tune(spec: SpecArgument, arch: Archs = None, variant: Variants = None,
         problem: Annotated[list[str] | None, typer.Option("--problem", metavar="SIZES", help=(
             'Sizes to time, such as "batch=2 seqlen_q=8192 num_heads_q=16", names as in explain; may be repeated: the '
             "geometric mean decides. By default 16k tokens, hidden size 2048, seqlen 512, 2048 and 8192."))] = None,
         top: Annotated[int, typer.Option("--top", min=1, metavar="N", help="Rows to show.")] = 10,
         limit: Annotated[int | None, typer.Option("--max", min=1, metavar="N", help=(
             "Candidates to compile and time, in the order of the model's prediction; by default 128."))] = None,
         rounds: Annotated[int, typer.Option("--rounds", min=1, metavar="N", help="Timings behind each median.")] = 15,
         jobs: Annotated[int | None, typer.Option("--jobs", "-j", min=1, metavar="N", help="Compilers.")] = None,
         write: Annotated[tuple[str, Path] | None, typer.Option("--write", metavar="table|spec PATH", help=(
             "Write the winner to a new file: as a row for codegen/families/FAMILY/tiles.py, or as a spec."))] = None,
         dry_run: Annotated[bool, typer.Option("--dry-run", help=(
             "List the candidates with the model's figures. Needs no GPU, and no compiler."))] = False) -> Output:
    """Time the tiles that fit one dense variant on this machine's GPU; exit code 7 if one computes a wrong result.

    What the spec sets (tile, stages, ...) stays set. The present tile is always among the candidates.
    """
    specs = select([spec], arch, variant)
    if write is not None:
        _check_write(write, dry_run)
    if dry_run:
        return _dry_run(_candidates(specs, None, problem, limit), len(specs), top)
    device = _device()
    found = _candidates(specs, device.archs(), problem, limit)
    from flashgen.runtime.measure.tune import tune as run

    tuning = run(device, found, rounds=rounds, jobs=jobs, phase=progress)
    written, parts = _written(tuning, write, select([spec]), jobs) if write else ({}, [])
    return Output({**tuning.to_json(), **written}, [*_head(found, len(specs)), *_report(tuning, top), *parts],
                  VerifyError.exit_code if tuning.wrong else 0)


def _check_write(write: tuple[str, Path], dry_run: bool) -> None:
    from flashgen.runtime.measure.tune_write import KINDS, refuse_existing

    kind, path = write
    if kind not in KINDS:
        raise UnsupportedError(f"cannot write a {kind}", where="--write", allowed=", ".join(KINDS),
                               nearest=next(iter(difflib.get_close_matches(kind, KINDS, n=1)), ""))
    if dry_run:
        raise UnsupportedError("a dry run has no winner to write", where="--write", allowed="without --dry-run")
    refuse_existing(path)


def _device() -> Any:
    from flashgen.runtime.launch.driver import need_device

    need_device("tune times kernels", "--dry-run lists the candidates with the model's figures")
    with loading_torch():
        from flashgen.runtime.measure.device import CudaDevice
    return CudaDevice()


def _candidates(specs: Sequence[Spec], archs: Sequence[str] | None, problems: list[str] | None, limit: int | None
                ) -> Candidates:
    """Of the most ordinary dense variant among `specs`, for a target among `archs` if these are given."""
    from flashgen.codegen.explain.candidates import MAX_CANDIDATES, candidates, shapes_of
    from flashgen.codegen.explain.explain import typical

    dense = [spec for spec in specs if spec.kv_layout == "dense"]
    if not dense:
        raise UnsupportedError(f"{specs[0].variant} is varlen, and tune times dense calls", where="--variant",
                               allowed="dense variants; a row of the tile table serves both layouts",
                               nearest=specs[0].with_(kv_layout="dense").variant)
    here = [spec for spec in dense if archs is None or spec.arch in archs]
    if not here:
        raise UnsupportedError(f"no dense variant is for {', '.join(archs or ())}", where="--arch",
                               allowed=", ".join(sorted({spec.arch for spec in dense})), nearest="--dry-run")
    chosen = typical(here)
    return candidates(chosen, shapes_of(chosen, problems or []), limit or MAX_CANDIDATES)


def _head(found: Candidates, variants: int) -> list[str | Table]:
    spec, shown = found.spec, f"{found.spec.variant}.{found.spec.arch}"
    more = f", one of {variants} variants; --variant names another" if variants > 1 else ""
    parts: list[str | Table] = [f"{shown}{more}", f"{len(found.kept)} candidates of {found.considered} tiles"]
    parts += [_dropped(row) for row in found.dropped]
    if found.present is None:
        parts.append(f"warning: the present tile of {spec.variant} does not fit: {found.present_error}")
    return parts


def _dropped(row: Dropped) -> str:
    return f"  {row.count} dropped: {row.reason}, such as {row.example}"


def _dry_run(found: Candidates, variants: int, top: int) -> Output:
    """Relative figures only: the model orders, it does not forecast."""
    best = min(c.estimate.predicted for c in found.kept)
    rows = [(str(c.tiling), f"{c.estimate.predicted / best:.3f}", c.estimate.bound, f"{c.estimate.issued:.3f}",
             f"{c.estimate.idle:.3f}", c.plan.launch.smem_bytes, "present" if c == found.present else "")
            for c in found.kept]
    shown = [row for number, row in enumerate(rows) if number < top or row[-1]]
    columns = ("tile", ">time / best", "bound", ">issued / visible", ">idle SMs", ">smem bytes", "")
    data = {"variant": found.spec.variant, "arch": found.spec.arch, "considered": found.considered,
            "shapes": [asdict(shape) for shape in found.shapes], "dropped": [asdict(row) for row in found.dropped],
            "present_error": found.present_error,
            "candidates": [{"variant": c.spec.variant, "tiling": asdict(c.tiling), "estimate": asdict(c.estimate),
                            "smem_bytes": c.plan.launch.smem_bytes, "present": c == found.present}
                           for c in found.kept]}
    rest = len(rows) - len(shown)
    return Output(data, [*_head(found, variants), "the model's figures; nothing was timed", Table(columns, shown),
                         *([f"{rest} more; --top shows them, --json lists all"] if rest else [])])


def _report(tuning: Tuning, top: int) -> list[str | Table]:
    from flashgen.runtime.measure.tune import NOISE

    columns = ("tile", *(f">{case.label}" for case in tuning.cases), ">speed / present", "")
    rows = []
    for number, timed in enumerate(tuning.ranked):
        ratio, present = tuning.ratio(timed), timed is tuning.present
        if number < top or present:
            rows.append((str(timed.candidate.tiling), *(f"{x:.0f}" for x in tuning.tflops(timed)),
                         "" if ratio is None else f"{ratio:.3f}", "present" if present else ""))
    parts: list[str | Table] = [
        *_unbuilt(tuning.unbuilt), f"{tuning.facts['gpu']}, driver {tuning.facts['driver']}; TFLOP/s of "
        f"{len(tuning.ranked)} candidates, the fastest first", Table(columns, rows)]
    ratio = tuning.ratio(tuning.winner)
    if ratio is None:
        parts.append("the present tile could not be timed: there is no ratio")
    elif tuning.winner is not tuning.present and ratio < 1 + NOISE:
        parts.append(f"the winner leads the present tile by less than two runs differ ({100 * NOISE:.0f} %)")
    return parts + [f"error: {fault.variant} {fault.reason}\n{fault.message}" for fault in tuning.wrong]


def _unbuilt(faults: Sequence[Fault]) -> list[str]:
    counts = Counter(fault.reason for fault in faults)
    first = {fault.reason: fault for fault in reversed(faults)}
    return [f"  {count} not built: {reason}, such as {first[reason].variant}: {first[reason].message}"
            for reason, count in counts.most_common()]


def _written(tuning: Tuning, write: tuple[str, Path], others: Sequence[Spec], jobs: int | None
             ) -> tuple[dict[str, Any], list[str | Table]]:
    """(what --json adds, what is printed)."""
    from flashgen.runtime.measure import tune_write as writer
    from flashgen.runtime.measure.tune import build, unbuilt

    kind, path = write
    text = writer.spec_text(tuning) if kind == "spec" else writer.table_text(tuning)
    writer.write_new(path, text)
    if kind == "spec":
        return {"written": str(path)}, [f"wrote {path}"]
    served = [tuning.winner.candidate.tiling.applied_to(one) for one in writer.same_row(tuning.found.spec, others)]
    with progress("building for the row's other variants", len(served)) as step:
        results = build(served, jobs, step)
    note = writer.row_note(unbuilt(results), len(results))
    data = {"written": str(path), "row": text, "row_note": note}
    return data, [text.rstrip("\n"), *filter(None, [note]), f"wrote {path}"]
