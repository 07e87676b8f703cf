"""What `flashgen tune --write` writes: a row of the tile table, for a person to review, or a tuned spec."""
from __future__ import annotations

import dataclasses
import json
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from flashgen.codegen.explain.candidates import present_row, tile_table
from flashgen.codegen.families.shared.tiles import Row
from flashgen.codegen.slots import mask_choice
from flashgen.codegen.spec.fields import rows
from flashgen.codegen.spec.show import show
from flashgen.codegen.spec.spec import Spec
from flashgen.codegen.target import TARGETS
from flashgen.errors import EnvironmentError_
from flashgen.runtime.measure.tune import Fault, Tuning

KINDS = ("table", "spec")
WIDTH = 118

def source_text(tuning: Tuning) -> str:
    """As the table says who measured a row."""
    figures = ", ".join(f"{tflops:.0f} TFLOP/s at {case.label}" for tflops, case in zip(
        tuning.tflops(tuning.winner), tuning.cases, strict=True))
    ratio = tuning.ratio(tuning.winner)
    return (f"fastest of {len(tuning.ranked)} candidates timed on {tuning.facts['gpu']}, "
            f"{tuning.facts['date'][:10]}: {figures}"
            + ("" if ratio is None else f"; {ratio:.3f} times the speed of the tile before"))


def table_text(tuning: Tuning) -> str:
    """The winner as a row of its family's tile table, with how to place it as comments.

    It lists what was timed and no more: one mask, one kind of kernel, the targets of one card.
    """
    spec, row, tile = tuning.found.spec, present_row(tuning.found.spec), tuning.winner.candidate.tiling
    winner = dataclasses.replace(
        row, head_dim_qk=spec.head_dim_qk, head_dim_v=spec.head_dim_v, m=tile.m, n=tile.n, warps=tile.warps,
        stages=tile.stages, masks=frozenset({mask_choice(spec.causal, spec.window)}),
        kinds=frozenset({tile_table(spec).kind_of(spec)}), source=source_text(tuning), **dict(tile.own),
        targets=frozenset(name for name in row.targets if TARGETS[name].device == TARGETS[spec.arch].device))
    lines = [f"# {spec.variant}.{spec.arch}: goes before the row of families/{spec.family}/tiles.py that serves it",
             f"# now, which stays for all else it lists: head dims ({row.head_dim_qk}, {row.head_dim_v}), "
             f"{row.m} x {row.n}, {', '.join(sorted(row.masks))}",
             f"TileRow({winner.head_dim_qk}, {winner.head_dim_v},", *(f"        {line}" for line in _named(winner))]
    return "\n".join(lines) + "),\n"


def _named(row: Row) -> list[str]:
    """The fields of a row that are not at their defaults, by name; constants of its module stand for their values."""
    constants = {value: name for name, value in vars(sys.modules[type(row).__module__]).items()
                 if isinstance(value, frozenset)}
    fields = [(field.name, getattr(row, field.name)) for field in dataclasses.fields(row)
              if field.kw_only and field.name != "source" and getattr(row, field.name) != field.default]
    texts = [f"{name}={constants.get(value) or _literal(value)}" for name, value in fields]
    source = [json.dumps(piece) for piece in _pieces(row.source)]
    return [*textwrap.wrap(", ".join(texts) + ",", WIDTH - 20, break_long_words=False, break_on_hyphens=False),
            f"source={source[0]}", *(f"       {piece}" for piece in source[1:-1]),
            *([f"       {source[-1]}"] if source[1:] else [])]


def _literal(value: object) -> str:
    if isinstance(value, frozenset):
        return f"frozenset({{{', '.join(map(json.dumps, sorted(value)))}}})"
    return json.dumps(value)


def _pieces(text: str) -> list[str]:
    """`text` cut between words, to be joined again by Python."""
    words = textwrap.wrap(text, WIDTH - 25, break_long_words=False, break_on_hyphens=False)
    return [*(f"{piece} " for piece in words[:-1]), words[-1]]


def spec_text(tuning: Tuning) -> str:
    """A spec file of the one variant, with every tile field of the winner explicit."""
    spec = tuning.winner.candidate.spec
    lines = [f"# {line}" for line in textwrap.wrap(f"Made by flashgen tune: {source_text(tuning)}.", WIDTH)]
    for row in rows():
        value = getattr(spec, row.attribute)
        if row.required or value != row.default:
            lines.append(f"{row.name}: {show(value)}")
    return "\n".join([*lines, ""])


def same_row(spec: Spec, others: Sequence[Spec]) -> list[Spec]:
    """The other variants that a table row for `spec` would serve: dtypes, layouts, all that it does not name."""
    def key(one: Spec) -> tuple[object, ...]:
        return (one.family, one.pass_, one.arch, one.head_dim_qk, one.head_dim_v, one.causal, one.window,
                tile_table(one).kind_of(one))
    return [other for other in others if key(other) == key(spec) and other != spec]


def row_note(failed: Sequence[Fault], built: int) -> str:
    """Whether the winner's tile builds for the others that the row would serve."""
    if failed:
        names = "; ".join(f"{fault.variant}: {fault.message}" for fault in failed)
        return f"warning: the row would also serve variants that it does not build for: {names}"
    return f"the tile also builds for the {built} other variants that the row would serve" if built else ""


def refuse_existing(path: Path) -> None:
    """Before anything is timed: a spec or the table itself is never written over."""
    if path.exists():
        raise EnvironmentError_("exists already, and tune writes new files only", where=str(path),
                                next="give another path, or remove it")


def write_new(path: Path, text: str) -> None:
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    except OSError as err:
        raise EnvironmentError_(f"cannot be written ({err.strerror})", where=str(path),
                                next="give another path to --write") from err
