"""`flashgen doctor`."""
from __future__ import annotations

import typer

from flashgen.cli.common import Output, command
from flashgen.cli.progress import progress


def register(app: typer.Typer) -> None:
    command(app, doctor)


def doctor() -> Output:
    """Check this machine: what works, what does not, and what to do about it. Exit code 8 if it cannot build."""
    from flashgen.runtime.doctor import PROBES, examine

    with progress("checking", len(PROBES)) as step:
        report = examine(step)
    return Output(report.to_json(), [str(report)], report.exit_code)
