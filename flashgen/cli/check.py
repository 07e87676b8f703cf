"""`flashgen check` and `flashgen new`: expressions looked at before anything is built, and a spec to start from."""
from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashgen.cli.common import Archs, Output, SpecArgument, Variants, command, select
from flashgen.errors import EnvironmentError_, UnsupportedError

if TYPE_CHECKING:
    from flashgen.codegen.explain.check import Check


def register(app: typer.Typer) -> None:
    command(app, new)
    command(app, check)


def check(spec: SpecArgument, arch: Archs = None, variant: Variants = None,
          seqlen_q: Annotated[int, typer.Option("--seqlen-q", metavar="N", help="Queries of the picture.")] = 2048,
          seqlen_kv: Annotated[int | None, typer.Option(
              "--seqlen-kv", metavar="N", help="Keys of the picture; as many as queries by default.")] = None,
          param: Annotated[list[str] | None, typer.Option("--param", metavar="NAME=VALUE", help=(
              "A parameter's value; of a tensor, one number for all elements, or index//N. May be repeated."))] = None,
          png: Annotated[Path | None, typer.Option("--png", metavar="FILE", help="Also draw the tiles there.")] = None,
          ) -> Output:
    """Show what a spec's expressions mean: types, folding, CUDA, and the tiles that the mask visits. Builds nothing."""
    from flashgen.codegen.explain.check import check as check_spec
    from flashgen.codegen.families.registry import fastest_first, op_of

    chosen = select([spec], arch, variant)
    if op_of(chosen[0]) != "attention":
        names = sorted(f"{one.name} (pass {one.by_op['attention'].name})" for one in fastest_first("attention"))
        raise UnsupportedError(f"check shows attention, not a {chosen[0].pass_}", where=chosen[0].name,
                               allowed=f"specs of {', '.join(names)}",
                               next=f"flashgen list {spec}")
    found = check_spec(chosen, seqlen_q, seqlen_kv, param or ())
    notes = [] if png is None else [f"wrote {draw(found, png)}"]
    return Output(found.to_json(), [str(found), *notes])


def draw(found: Check, path: Path) -> Path:
    """The tiles as a picture. EnvironmentError_ where there is nothing to draw with, or no place for it."""
    tiles = found.tiles
    if tiles is None:
        raise EnvironmentError_("a window comes with each call: there are no tiles to draw", where="--png",
                                next="a mask such as `kv_pos <= q_pos and q_pos - kv_pos < window`")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import ListedColormap
        from matplotlib.figure import Figure
    except ImportError as err:
        raise EnvironmentError_(f"matplotlib cannot be imported: {err}", where="--png",
                                next="pip install 'flashgen[plots]'") from err
    figure = Figure(figsize=(5, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.imshow([list(row) for row in tiles.cells], cmap=ListedColormap(["#eeeeee", "#8fb8de", "#1f5a96"]), vmin=0,
                vmax=2, interpolation="nearest", aspect="auto",
                extent=(0, tiles.seqlen_kv, tiles.seqlen_q, 0))
    axes.set(xlabel="keys", ylabel="queries")
    axes.set_title(f"{found.spec.name}: {tiles.visited} of {tiles.total} tiles, {tiles.count(1)} masked", fontsize=9)
    try:
        figure.savefig(path, dpi=150, format="png")  # to this very file, whatever its name ends in
    except OSError as err:
        raise EnvironmentError_(f"cannot be written ({err.strerror})", where=str(path)) from err
    return path


def new(name: Annotated[str, typer.Argument(metavar="NAME", help="Of the spec: the file is NAME.yaml.")],
        base: Annotated[str, typer.Option("--from", metavar="SPEC", help=(
            "A shipped spec or variant, or a spec file: its family, and its expressions if it has such."))] = "fa3_fwd",
        ) -> Output:
    """Write a commented spec to start from, in this folder. Never over a file that is there."""
    from flashgen.codegen.spec.starter import starter

    path, text = Path(f"{name}.yaml"), starter(name, base)
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise EnvironmentError_("exists already, and new writes new files only", where=str(path),
                                next="another NAME, or remove it") from None
    except OSError as err:
        raise EnvironmentError_(f"cannot be written ({err.strerror})", where=str(path)) from err
    step = f"flashgen check {path}"
    return Output({"written": str(path), "next": step}, [f"wrote {path}\n  next: {step}"])
