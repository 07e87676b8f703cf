"""`flashgen verify`."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from flashgen.cli.common import Archs, Output, SpecArgument, Table, Variants, command, select
from flashgen.cli.progress import loading_torch, progress
from flashgen.errors import VerifyError

if TYPE_CHECKING:
    from flashgen.runtime.verify.verify import Result

SHOWN_FAILURES = 5


def register(app: typer.Typer) -> None:
    command(app, verify)


def verify(spec: SpecArgument, arch: Archs = None, variant: Variants = None,
           seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of the random inputs.")] = 0,
           emulate: Annotated[bool, typer.Option(
               "--emulate", help="On the CPU, under the race checker; any target.")] = False,
           seeds: Annotated[int, typer.Option(
               "--seeds", metavar="N", min=1, help="How many seeds, from --seed on.")] = 1) -> Output:
    """Check every variant for this machine's GPU against an fp64 reference. Exit code 7 if one fails."""
    specs = select([spec], arch, variant)
    if not emulate:
        from flashgen.runtime.launch.driver import need_device

        need_device("verify runs kernels", "--emulate runs them on the CPU")
    with loading_torch():
        from flashgen.runtime.verify.verify import verify_spec
    results: list[Result] = []
    for one in range(seed, seed + seeds):
        with progress(f"verifying, seed {one}", len(specs)) as step:
            results += verify_spec(specs, seed=one, path=spec, emulate=emulate,
                                   progress=lambda done, total, name: step(done, name))
    failures = [result for result in results if not result.ok]
    data = {"seed": seed, "seeds": seeds, "emulated": emulate, "checks": len(results), "failed": len(failures),
            "results": [asdict(r) for r in results]}
    seeds_text = f"seed {seed}" + (f" to {seed + seeds - 1}" if seeds > 1 else "")
    return Output(data, [_table(results), *_failures(failures),
                         f"{len(results)} checks, {len(failures)} failed; {seeds_text}"],
                  VerifyError.exit_code if failures else 0)


def _table(results: Sequence[Result]) -> Table:
    by_kernel: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        by_kernel.setdefault((result.variant, result.arch), []).append(result)
    rows = []
    for (variant, arch), own in by_kernel.items():
        worst = max((r.out_error / r.out_allowed for r in own if r.ok and r.out_allowed), default=0.0)
        failed = sum(not r.ok for r in own)
        rows.append((variant, arch, len(own), f"{100 * worst:.0f} %", f"{max(r.lse_error for r in own):.1e}",
                     f"{failed} failed" if failed else "ok"))
    return Table(("variant", "arch", ">checks", ">worst error of allowed", ">worst lse error", ""), rows)


def _failures(failures: Sequence[Result]) -> list[str]:
    parts = [f"error: {result.variant}.{result.arch}, {result.check}, {result.problem}\n{result.message}"
             for result in failures[:SHOWN_FAILURES]]
    rest = len(failures) - SHOWN_FAILURES
    return [*parts, f"error: {rest} more failures; --json lists them all"] if rest > 0 else parts
