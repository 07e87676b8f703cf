"""`flashgen build` and `flashgen bundle`."""
from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashgen.cli.common import Archs, Output, SpecArguments, Table, Variants, command, select
from flashgen.cli.progress import progress
from flashgen.errors import CompileError, SpecError, UnsupportedError

if TYPE_CHECKING:
    from flashgen.codegen.spec.spec import Spec
    from flashgen.runtime.compile.build import BuildResult, Rendered
    from flashgen.runtime.compile.build_folder import BuildFolder
    from flashgen.runtime.compile.cache import Cache

Jobs = Annotated[int | None, typer.Option(
    "--jobs", "-j", min=1, metavar="N", help="Worker processes; by default what CPUs and free memory allow.")]
SHOWN_ERRORS = 3  # in full; the others by name


def register(app: typer.Typer) -> None:
    command(app, build)
    command(app, bundle)


def build(specs: SpecArguments, arch: Archs = None, variant: Variants = None, jobs: Jobs = None,
          out: Annotated[Path | None, typer.Option(
              "--out", "-o", metavar="DIR", help="Also write the kernels there, with a build.ninja for ninja -C DIR."
          )] = None,
          sources_only: Annotated[bool, typer.Option(
              "--sources-only", help="Write DIR without compiling: ninja -C DIR does the rest.")] = False) -> Output:
    """Compile variants into the cache. Needs no GPU. Exit code 5 if one of them fails."""
    from flashgen.runtime.compile.cache import Cache

    since_ns = time.time_ns()
    chosen, cache = select(specs, arch, variant), Cache()
    if out is None:
        if sources_only:
            raise SpecError("there is no folder to write sources to", where="--sources-only", allowed="with -o DIR")
        return _output(_compiled(chosen, cache, jobs), cache)
    from flashgen.codegen.spec.spec import spec_path
    from flashgen.runtime.compile.build_folder import BuildFolder

    folder = BuildFolder(out)
    options = [f"--arch={name}" for name in arch or ()] + [f"--variant={glob}" for glob in variant or ()]

    def write(kernels: list[Rendered]) -> None:
        folder.write_sources(kernels, [spec_path(spec) for spec in specs], options, jobs, since_ns)

    return _sources(chosen, folder, write) if sources_only else _filled(chosen, cache, jobs, folder, write)


def _sources(chosen: list[Spec], folder: BuildFolder, write: Callable[[list[Rendered]], None]) -> Output:
    from flashgen.runtime.compile.build import rendered

    kernels: list[Rendered] = []
    with progress("rendering", len(chosen)) as step:
        for spec in chosen:
            step(len(kernels), spec.variant)
            kernels.append(rendered(spec))
    write(kernels)
    return Output({"folder": str(folder.path), "kernels": folder.kernels()},
                  [f"{len(folder.kernels())} sources and build.ninja in {folder.path}"])


def _filled(chosen: list[Spec], cache: Cache, jobs: int | None, folder: BuildFolder,
            write: Callable[[list[Rendered]], None]) -> Output:
    """Sources first, so that ninja can go on where this process is ended; a bundle if every kernel compiles."""
    written: list[Rendered] = []

    def before(kernels: list[Rendered]) -> None:
        write(kernels)
        written.extend(kernels)

    results = _compiled(chosen, cache, jobs, before)
    failed = sum(bool(result.error) for result in results)
    place = f"  no bundle at {folder.path}: {failed} of its kernels failed"
    if written:
        for result in results:
            if result.entry:
                folder.put(result.entry)
        place += f"; ninja -C {folder.path} builds what is missing"
    if not failed:
        place = f"  kernels and build.ninja in {folder.write_manifest()}"
    return _output(results, cache, None if failed else folder.path, place)


def bundle(specs: SpecArguments,
           out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="The bundle's folder.")],
           arch: Archs = None, variant: Variants = None, jobs: Jobs = None) -> Output:
    """Write a folder of compiled kernels that flashgen.load_bundle serves without a compiler."""
    from flashgen.codegen.families.registry import FAMILIES
    from flashgen.runtime.compile.cache import Cache

    chosen, cache = select(specs, arch, variant), Cache()
    if by_name := sorted({spec.family for spec in chosen if FAMILIES[spec.family].named_only}):
        raise UnsupportedError(f"kernels of {' and '.join(by_name)} in a bundle, which serves calls that name no spec",
                               where="bundle", allowed="families that serve such calls", next="flashgen build SPEC")
    results = _compiled(chosen, cache, jobs)
    failed = sum(bool(result.error) for result in results)
    if failed:
        return _output(results, cache, None, f"  no bundle at {out}: {failed} of its kernels failed")
    from flashgen.runtime.select.bundle import write_bundle

    written = write_bundle([result.entry for result in results if result.entry], out)
    return _output(results, cache, written, f"  bundle {written}")


def _compiled(chosen: list[Spec], cache: Cache, jobs: int | None,
              before: Callable[[list[Rendered]], None] | None = None) -> list[BuildResult]:
    from flashgen.runtime.compile.build import build_specs

    with progress("building", len(chosen)) as step:
        return build_specs(chosen, cache, jobs, lambda result, done, total: step(done, result.variant), before=before)


def _output(results: list[BuildResult], cache: Cache, bundle: Path | None = None, place: str = "") -> Output:
    """The answer: a row for each variant, the errors, and where things are now."""
    failed = [result for result in results if result.error]
    data = {"results": [result.to_json() | {"smem_bytes": _smem_bytes(result)} for result in results],
            "built": sum(not r.hit and not r.error for r in results), "hits": sum(r.hit for r in results),
            "failed": len(failed), "cache": str(cache.directory or "") or None, "bundle": str(bundle or "") or None}
    return Output(data, [*_rows(results), *_errors(failed), _cached(results, cache), *filter(None, [place])],
                  CompileError.exit_code if failed else 0)


def _smem_bytes(result: BuildResult) -> int | None:
    """Dynamic shared memory of a block, which is the plan's; None if there is no kernel."""
    return result.entry.plan.launch.smem_bytes if result.entry else None


def _cells(result: BuildResult) -> tuple[Any, ...]:
    r = result.resources if result.entry and result.entry.plan.compiles_here else None
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
    if registers == "":
        return [f"{variant}.{arch}: {state} in {seconds} s", "  source alone: it is compiled where it is launched"]
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


def _cached(results: list[BuildResult], cache: Cache) -> str:
    if len(results) == 1 and results[0].path:
        return f"  in {results[0].path}"
    failed, hits = sum(bool(result.error) for result in results), sum(result.hit for result in results)
    return (f"{len(results) - hits - failed} built, {hits} from the cache, {failed} failed; "
            f"in {cache.directory or 'memory only'}")
