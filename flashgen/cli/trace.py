"""`flashgen trace`."""
from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from flashgen.cli.common import Archs, Output, SpecArgument, Variants, command, select
from flashgen.cli.progress import loading_torch, progress


def register(app: typer.Typer) -> None:
    command(app, trace)


def trace(spec: SpecArgument, arch: Archs = None, variant: Variants = None,
          problem: Annotated[str, typer.Option(
              "--problem", metavar="SIZES", help='Sizes of the call, as in explain. Default: "batch=1 seqlen_q=256 '
              'num_heads_q=1"; the others follow.')] = "",
          block: Annotated[int, typer.Option("--block", metavar="N", min=0, help="Which block of the grid.")] = 0,
          out: Annotated[Path, typer.Option(
              "--out", "-o", metavar="FILE", help="The page (HTML), or a picture if it ends in .png."
          )] = Path("trace.html")) -> Output:
    """Draw what the warps of one block do and wait for, from a run on the emulator. Needs a C++ compiler, no GPU."""
    from flashgen.codegen.explain.counts import parse_shape
    from flashgen.codegen.explain.explain import typical

    chosen, sizes = typical(select([spec], arch, variant)), parse_shape(problem)
    with loading_torch():
        from flashgen.runtime.emulator.trace import KINDS, timeline
        from flashgen.runtime.emulator.trace_draw import write
    with progress("tracing", 2) as step:
        step(0, f"running {chosen.variant} on the emulator")
        made = timeline(chosen, sizes, block)
        step(1, f"drawing {out}")
        write(made, out)
    rows = [{**asdict(span), "text": made.text(span)} for span in made.spans]
    data = {"file": str(out), "variant": chosen.variant, "arch": chosen.arch, "block": block, "clocks": made.clocks,
            "warps": made.warps, "kinds": KINDS, "spans": rows}
    return Output(data, [f"{out}: {made.clocks:.0f} modelled clocks of {made.title}"])
