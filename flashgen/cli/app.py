"""All commands in one typer app. Each module imports what is heavy inside its commands, so that `list` stays quick."""
from __future__ import annotations

import io
import os
import sys
import warnings
from typing import Annotated, Any, TextIO

import typer

from flashgen import errors
from flashgen.cli import bench, build, cache, check, doctor, explain, lineage, specs, trace, tune, verify
from flashgen.cli.common import INTERRUPTED, READER_LEFT, to_stdout


def _exit_codes() -> str:
    codes: dict[int, list[str]] = {}
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, errors.FlashgenError):
            codes.setdefault(kind.exit_code, []).append(kind.__name__.rstrip("_"))
    rows = [f"{code} {' or '.join(names)}" for code, names in sorted(codes.items())]
    return ("Exit codes: 0 success; " + "; ".join(rows) + ". A bad command line is 2, a build with failures 5, a "
            f"failed verification 7, an interrupt {INTERRUPTED}, a reader of the output who left early {READER_LEFT}. "
            "Every command takes --json: one JSON document on standard output, errors included.")


app = typer.Typer(name="flashgen", no_args_is_help=True, add_completion=False, rich_markup_mode=None,
                  pretty_exceptions_enable=False, epilog=_exit_codes(),
                  help="Attention kernels from YAML specs: build, explain, verify, time and ship them.")
for module in (build, specs, check, explain, verify, trace, bench, lineage, tune, cache, doctor):
    module.register(app)


def _version(wanted: bool) -> None:
    if wanted:
        from flashgen import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def _options(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True,
                                                   help="Print the version and exit.")] = False) -> None:
    pass


def run() -> None:
    """Parse sys.argv and do what it says. Ends with SystemExit, whatever standard output and standard error are."""
    def show(message: Any, category: Any, filename: Any, lineno: Any, file: TextIO | None = None,
             line: Any = None) -> None:
        print(f"warning: {message}", file=sys.stderr)

    warnings.showwarning = show
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started this process
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  to the end
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a name may hold what the terminal's encoding lacks
    code: Any = 0
    try:
        with to_stdout():  # --help and --version print, too
            try:
                app()
            except SystemExit as end:
                code = end.code
    except typer.Exit as end:
        code = end.exit_code
    sys.exit(code)
