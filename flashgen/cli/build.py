"""`flashgen build` and `flashgen bundle`."""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashgen.cli.common import Archs, Output, SpecArguments, Table, Variants, command, select
from flashgen.cli.progress import progress
from flashgen.errors import CompileError

if TYPE_CHECKING:
    from flashgen.runtime.build import BuildResult
    from flashgen.runtime.cache import Cache

Jobs = Annotated[int | None, typer.Option(
    "--jobs", "-j", min=1, metavar="N", help="Worker processes; by default what CPUs and free memory allow.")]
SHOWN_ERRORS = 3  # in full; the others by name


def register(app: typer.Typer) -> None:
    command(app, build)
    command(app, bundle)


def build(specs: SpecArguments, arch: Archs = None, variant: Variants = None, jobs: Jobs = None,
          out: Annotated[Path | None, typer.Option(
              "--out", "-o", metavar="DIR", help="Also write the kernels there as a bundle.")] = None) -> Output:
    """Compile variants into the cache. Needs no GPU. Exit code 5 if one of them fails."""
    return _build(specs, arch, variant, jobs, out)


def bundle(specs: SpecArguments,
           out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="The bundle's folder.")],
           arch: Archs = None, variant: Variants = None, jobs: Jobs = None) -> Output:
    """Write a folder of compiled kernels that flashgen.load_bundle serves without a compiler."""
    return _build(specs, arch, variant, jobs, out)


def _build(files: list[str], archs: Sequence[str] | None, variants: Sequence[str] | None, jobs: int | None,
           out: Path | None) -> Output:
    from flashgen.runtime.build import build_specs
    from flashgen.runtime.cache import Cache

    chosen, cache = select(files, archs, variants), Cache()
    with progress("building", len(chosen)) as step:
        results = build_specs(chosen, cache, jobs, lambda result, done, total: step(done, result.variant))
    failed = [result for result in results if result.error]
    written = None
    if out is not None and not failed:
        from flashgen.runtime.bundle import write_bundle

        written = write_bundle([result.entry for result in results if result.entry], out)
    data = {"results": [result.to_json() | {"smem_bytes": _smem_bytes(result)} for result in results],
            "built": sum(not r.hit and not r.error for r in results), "hits": sum(r.hit for r in results),
            "failed": len(failed), "cache": str(cache.directory or "") or None, "bundle": str(written or "") or None}
    return Output(data, [*_rows(results), *_errors(failed), *_places(results, cache, out, written)],
                  CompileError.exit_code if failed else 0)


def _smem_bytes(result: BuildResult) -> int | None:
    """Dynamic shared memory of a block, which is the plan's; None if there is no kernel."""
    return result.entry.plan.launch.smem_bytes if result.entry else None


def _cells(result: BuildResult) -> tuple[Any, ...]:
    r = result.resources
    figures = (r.registers, r.spill_store_bytes + r.spill_load_bytes, _smem_bytes(result), r.code_bytes) if r else (
        "", "", "", "")
    return (result.variant, result.arch, *figures, f"{result.seconds:.2f}",
            "failed" if result.error else "hit" if result.hit else "built")


COLUMNS = ("variant", "arch", ">registers", ">spilled bytes", ">smem bytes", ">code bytes", ">seconds", "")


def _rows(results: list[BuildResult]) -> list[str | Table]:
    if len(results) > 1:
        return [Table(COLUMNS, [_cells(result) for result in results])]
    # One variant takes no table: a hit is to answer before a table could be imported.
    variant, arch, registers, spills, smem, code, seconds, state = _cells(results[0])
    if results[0].error:
        return []
    return [f"{variant}.{arch}: {state} in {seconds} s",
            f"  {registers} registers, {spills} spilled bytes, {smem} bytes of shared memory, {code} bytes of code"]


def _errors(failed: list[BuildResult]) -> list[str]:
    parts = []
    for result in failed[:SHOWN_ERRORS]:
        error = result.error or {}
        lines = [f"error: {error['where'] or f'{result.variant}.{result.arch}'}: {error['what']}"]
        lines += [f"  {label}: {error[label]}" for label in ("allowed", "nearest", "next") if error[label]]
        parts.append("\n".join([*lines, *filter(None, [error["details"]])]))
    rest = [f"{result.variant}.{result.arch}" for result in failed[SHOWN_ERRORS:]]
    return parts + ([f"error: {len(rest)} more failed: {', '.join(rest)}"] if rest else [])


def _places(results: list[BuildResult], cache: Cache, out: Path | None, written: Path | None) -> list[str]:
    failed = sum(bool(result.error) for result in results)
    if len(results) == 1 and results[0].path:
        parts = [f"  in {results[0].path}"]
    else:
        hits = sum(result.hit for result in results)
        parts = [f"{len(results) - hits - failed} built, {hits} from the cache, {failed} failed; "
                 f"in {cache.directory or 'memory only'}"]
    if written:
        parts.append(f"  bundle {written}")
    elif out is not None:
        parts.append(f"  no bundle at {out}: {failed} of its kernels failed")
    return parts
