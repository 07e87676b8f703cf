"""What the commands share: how they answer, how they end, and how they pick variants."""
from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashgen.codegen.target import TARGETS
from flashgen.errors import EnvironmentError_, FlashgenError, SpecError, of_os

if TYPE_CHECKING:
    from flashgen.codegen.spec.spec import Spec

SpecArgument = Annotated[str, typer.Argument(metavar="SPEC", help="A spec file, or the name of a shipped one.")]
SpecArguments = Annotated[list[str], typer.Argument(metavar="SPEC...", help="Spec files, or names of shipped ones.")]
Archs = Annotated[list[str] | None, typer.Option("--arch", metavar="ARCH", help="Only this target; may be repeated.")]
Variants = Annotated[list[str] | None, typer.Option(
    "--variant", metavar="GLOB", help="Only variants whose name (or name.arch) matches; may be repeated.")]
_Json = Annotated[bool, typer.Option("--json", help="One JSON document on standard output, and nothing else there.")]


@dataclass(frozen=True)
class Table:
    columns: Sequence[str]       # a leading ">" aligns right
    rows: Sequence[Sequence[object]]

    def show(self) -> None:
        """On a terminal as wide as that is; else plain columns, one line per row, for grep and awk."""
        names = [column.removeprefix(">") for column in self.columns]
        right = [column.startswith(">") for column in self.columns]
        cells = [names, *([str(cell) for cell in row] for row in self.rows)]
        if not sys.stdout.isatty():
            widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
            for row in cells:
                print("  ".join(f"{cell:{'>' if r else '<'}{width}}"
                                for cell, r, width in zip(row, right, widths, strict=True)).rstrip())
            return
        from rich import box  # tens of milliseconds, so only where its work is seen
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for name, r in zip(names, right, strict=True):
            table.add_column(name, justify="right" if r else "left", overflow="fold")
        for row in cells[1:]:
            table.add_row(*map(Text, row))
        Console().print(table)


@dataclass(frozen=True)
class Output:
    """The answer of a command: `data` for --json; else `parts`, texts and tables, are printed in order."""

    data: Any
    parts: Sequence[str | Table]
    exit_code: int = 0


INTERRUPTED, READER_LEFT = 130, 141  # exit codes, as shells give them for the signals SIGINT and SIGPIPE


def command(app: typer.Typer, function: Callable[..., Output], name: str | None = None) -> None:
    """Add `function` to `app` as a command that takes --json and turns a FlashgenError into its exit code.

    An OSError that no check foresaw (a full disk, a name that is too long) is told in the same shape. Other exceptions
    are faults of flashgen, and keep their traceback.
    """
    @functools.wraps(function)
    def run(*arguments: Any, as_json: bool, **options: Any) -> None:
        try:
            # what libraries print must not mix with the document
            with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
                output = function(*arguments, **options)
        except FlashgenError as error:
            output = _refusal(error, as_json)
        except OSError as error:
            output = _refusal(of_os(error), as_json)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None
        with to_stdout():
            if as_json:
                print(json.dumps(output.data, indent=1))
            else:
                for part in output.parts:
                    print(part) if isinstance(part, str) else part.show()
        if output.exit_code:
            raise typer.Exit(output.exit_code)

    signature = inspect.signature(function, eval_str=True)
    json_option = inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=_Json)
    run.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*signature.parameters.values(), json_option], return_annotation=None)
    app.command(name or function.__name__)(run)


def _refusal(error: FlashgenError, as_json: bool) -> Output:
    """What --json answers with; the text goes to standard error."""
    from flashgen.runtime.compile.build import error_json

    if not as_json:
        print(f"error: {error}", file=sys.stderr)
    return Output({"error": error_json(error)}, [], error.exit_code)


@contextlib.contextmanager
def to_stdout() -> Iterator[None]:
    """Writes what is printed in here at once. The process ends quietly if the reader has left, as `head` does, and
    with an error if standard output cannot be written."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        # What is still in the buffer would fail again when the interpreter ends.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        if isinstance(error, BrokenPipeError):
            raise typer.Exit(READER_LEFT) from None
        print(f"error: standard output: {error.strerror}", file=sys.stderr)
        raise typer.Exit(EnvironmentError_.exit_code) from None


def select(files: Sequence[str], archs: Sequence[str] | None = None, variants: Sequence[str] | None = None
           ) -> list[Spec]:
    """The variants of spec files that --arch and --variant leave. SpecError if one of these matches nothing."""
    from flashgen.codegen.spec.spec import load_specs, spec_path

    specs = [spec for file in files for spec in load_specs(spec_path(file)).specs]
    present = sorted({spec.arch for spec in specs})
    for arch in archs or ():
        if arch not in present:
            what = f"{arch} is not among the targets of {', '.join(files)}" if arch in TARGETS else f"no target {arch}"
            raise SpecError(what, where="--arch", allowed=", ".join(present), nearest=_near(arch, present))
    for glob in variants or ():
        if not any(_matches(spec, glob) for spec in specs):
            names = sorted({spec.variant for spec in specs})
            raise SpecError(f"no variant matches {glob}", where="--variant", nearest=_near(glob, names),
                            allowed=f"{len(names)} names, * and ? as in file names",
                            next=f"flashgen list {files[0]}")
    chosen = [spec for spec in specs if (not archs or spec.arch in archs)
              and (not variants or any(_matches(spec, glob) for glob in variants))]
    if not chosen:
        raise SpecError(f"no variant matches both --arch {', '.join(archs or ())} and --variant "
                        f"{', '.join(variants or ())}", where=", ".join(files), next=f"flashgen list {files[0]}")
    return chosen


def _matches(spec: Spec, glob: str) -> bool:
    return fnmatchcase(spec.variant, glob) or fnmatchcase(f"{spec.variant}.{spec.arch}", glob)


def _near(text: str, words: Sequence[str]) -> str:
    return next(iter(difflib.get_close_matches(text, words, n=1, cutoff=0.3)), "")
