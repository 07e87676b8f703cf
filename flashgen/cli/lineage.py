"""`flashgen lineage`."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashgen.cli.common import Output, Table, command
from flashgen.cli.progress import loading_torch, progress
from flashgen.errors import EnvironmentError_, UnsupportedError

if TYPE_CHECKING:
    from flashgen.runtime.measure.lineage import Lineage

PROBLEM = "batch=8 seqlen=4096 heads=16 head_dim=128 causal=true dtype=bf16"
PURPOSE = ("lineage times kernels", "flashgen lineage --target sm_90a gives the half that needs no GPU")


def register(app: typer.Typer) -> None:
    command(app, lineage)


def lineage(
        problem: Annotated[str, typer.Option("--problem", metavar="SIZES", help=(
            "Names: batch, seqlen, heads, heads_kv, head_dim, causal, window=left,right, dtype; for a decode over a "
            "latent cache batch, cached, heads, new, dtype."))] = PROBLEM,
        seqlens: Annotated[str, typer.Option("--seqlens", metavar="N,N,...", help=(
            "Several lengths in the place of seqlen, or of cached."))] = "",
        backward: Annotated[bool, typer.Option("--backward", help=(
            "Also forward and backward together, of each generation that has both."))] = False,
        counters: Annotated[bool, typer.Option("--counters", help=(
            "Also count the bytes of device memory, by Nsight Compute's ncu."))] = False,
        target: Annotated[str, typer.Option("--target", metavar="ARCH", help=(
            "Only predict, for the card of this target. Needs no GPU."))] = "",
        rounds: Annotated[int, typer.Option("--rounds", min=1, metavar="N", help="Timings behind each median.")] = 15,
        timer: Annotated[str, typer.Option("--timer", help="graph (CUDA graph replay) or events.")] = "graph",
        given_commit: Annotated[str | None, typer.Option("--commit", envvar="FLASHGEN_COMMIT", metavar="HASH", help=(
            "For the results, where git is absent."))] = None,
        out: Annotated[Path | None, typer.Option("--out", "-o", metavar="DIR", help=(
            "Write JSON and two pictures below DIR/<gpu>."))] = None) -> Output:
    """Set the generations of attention side by side on one problem: time, bytes, memory, error.

    Bytes are predicted from each generation's tiles. Running out of memory is a result."""
    from flashgen.runtime.measure.bench import write_results
    from flashgen.runtime.measure.lineage import lineage_for, parse_lengths, parse_problem, predict
    from flashgen.runtime.ops.registry import lineages

    words = parse_problem(problem)
    chosen = lineage_for([*words], lineages())
    cases = chosen.cases(words, parse_lengths(seqlens))
    if target and counters:
        raise UnsupportedError("--counters beside --target, which runs nothing", where="--counters",
                               allowed="one of the two")

    def store(results: dict[str, Any]) -> Path | None:
        return write_results(results, out, chosen.stem) if out else None

    results = (predict(chosen, cases, target, backward=backward, given_commit=given_commit) if target else
               _measured(chosen, cases, store, timer=timer, counted=counters, backward=backward, rounds=rounds,
                         given_commit=given_commit))
    path = store(results)
    return Output(results, [*tables(results), *([f"wrote {path}", *_pictures(results, path)] if path else [])])


def _measured(chosen: Lineage, cases: list[Any], store: Callable[[dict[str, Any]], object], *, timer: str,
              counted: bool, **options: Any) -> dict[str, Any]:
    from flashgen.runtime.launch.driver import need_device
    from flashgen.runtime.measure.lineage import measure
    from flashgen.runtime.measure.ncu import counter, find_ncu

    ncu = find_ncu() if counted else ""
    need_device(*PURPOSE)
    with loading_torch():
        from flashgen.runtime.measure.device import CudaDevice
    with progress("timing", len(cases)) as step:
        return measure(CudaDevice(timer), chosen, cases, progress=step, store=store,
                       counters=counter(ncu, chosen) if ncu else None, **options)


def tables(results: Mapping[str, Any]) -> list[str | Table]:
    """A line for each row, and why rows are refused."""
    rows, card = results["rows"], results["card"]
    first = f"{results['gpu']}, driver {results['driver']}" if results["driver"] else f"{card['name']}, predicted"
    titles = ["generation", "problem", ">ms", ">TFLOP/s", ">at least ms", ">bytes predicted", ">bytes measured",
              ">peak memory", ">error", "result"]
    cells = [_cells(row) for row in rows]
    kept = [number for number in range(len(titles)) if any(line[number] for line in cells)]
    notes = dict.fromkeys(f"{row['generation']}, {row['passes']}: {row['why']}" for row in rows if row["why"])
    return [f"{first}; at least: the rates of {card['name']}, {card['bf16_tflops']:g} TFLOP/s and "
            f"{card['memory_gbps']:g} GB/s",
            Table([titles[number] for number in kept], [[line[number] for number in kept] for line in cells]),
            *(f"refused: {note}" for note in notes)]


def _cells(row: Mapping[str, Any]) -> list[str]:
    from flashgen.codegen.explain.text import si
    from flashgen.runtime.measure.lineage import title_of

    said, found = row["predicted"] or {}, row["measured"]

    def number(values: Mapping[str, Any], name: str, form: str) -> str:
        return form.format(values[name]) if values.get(name) is not None else ""

    def size(value: int | None) -> str:
        return "" if value is None else si(value, "B")

    counted = found["read"] + found["written"] if "read" in found else None
    return [title_of(row), row["label"], number(found, "ms", "{:.4f}"), number(found, "tflops", "{:.0f}"),
            number(said, "ms", "{:.4f}"), size(said.get("bytes")), size(counted),
            size(found.get("peak_bytes", said.get("memory_bytes"))), number(found, "error", "{:.1e}"), row["status"]]


def _pictures(results: Mapping[str, Any], path: Path) -> list[str]:
    from flashgen.runtime.measure.lineage_plot import draw_lengths, draw_roofline

    try:
        return [f"wrote {draw(results, path.with_name(f'{path.stem}-{name}.png'))}"
                for name, draw in (("roofline", draw_roofline), ("lengths", draw_lengths))]
    except EnvironmentError_ as err:  # the figures are there: a picture is an extra
        return [f"warning: {err}"]
