"""What `flashgen tune --write` writes: a row of the tile table, for a person to review, or a tuned spec."""
from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path

from flashgen.codegen.explain.candidates import present_row
from flashgen.codegen.families.shared import tiles
from flashgen.codegen.families.shared.tiles import kernel_kind
from flashgen.codegen.slots import mask_choice
from flashgen.codegen.spec.fields import rows
from flashgen.codegen.spec.spec import Spec
from flashgen.codegen.spec.yaml_tree import show
from flashgen.errors import EnvironmentError_
from flashgen.runtime.measure.tune import Fault, Tuning

KINDS = ("table", "spec")
WIDTH = 118
_NAMES = ("FULL", "CAUSAL", "WHOLE", "SPLIT", "PACKED")  # sets of families/shared/tiles.py that hold one value
_TARGET_NAMES = ("HOPPER", "B200", "A100")  # likewise, whose targets are one kind of card each


def source_text(tuning: Tuning) -> str:
    """As the table says who measured a row."""
    figures = ", ".join(f"{tflops:.0f} TFLOP/s at {case.label}" for tflops, case in zip(
        tuning.tflops(tuning.winner), tuning.cases, strict=True))
    ratio = tuning.ratio(tuning.winner)
    return (f"fastest of {len(tuning.ranked)} candidates timed on {tuning.facts['gpu']}, "
            f"{tuning.facts['date'][:10]}: {figures}"
            + ("" if ratio is None else f"; {ratio:.3f} times the speed of the tile before"))


def table_text(tuning: Tuning) -> str:
    """The winner as a row in the form of its family's rows in the tile table, with how to place it as comments.

    It lists what was timed and no more: one mask, one kind of kernel.
    """
    spec, row, tile = tuning.found.spec, present_row(tuning.found.spec), tuning.winner.candidate.tiling
    mask, kind = mask_choice(spec.causal, spec.window), kernel_kind(spec.split, spec.pack_gqa)
    shared = (f"{_named(mask)}, {spec.head_dim_qk}, {spec.head_dim_v}, {tile.m}, {tile.n}, {tile.warps}, "
              f"{tile.stages}")
    lines = [f"# {spec.variant}.{spec.arch}: goes before the row of families/shared/tiles.py that serves it now,",
             f"# which stays for all else it lists: head dims ({row.head_dim_qk}, {row.head_dim_v}), "
             f"{row.m} x {row.n}, {', '.join(sorted(row.masks))}"]
    quoted = [json.dumps(piece) for piece in _pieces(source_text(tuning))]
    if spec.family == "fa2":
        quoted[-1] += ","
        lines += ["*_rows(", f"    {_targets(spec)},", *(f"    {piece}" for piece in quoted),
                  f'    ({shared}, {tile.blocks_per_sm}, "{tile.q_operand}", {row.register_usage_level}),', "),"]
    else:
        quoted[-1] += "),"
        lines += [f'({shared}, {tile.q_stages}, "{tile.p_operand}", "{tile.schedule}", {_named(kind)},',
                  *(f" {piece}" for piece in quoted)]
    return "\n".join([*lines, ""])


def _named(value: object) -> str:
    """The set of this one value, by its name in the table where it has one."""
    name = next((name for name in _NAMES if getattr(tiles, name) == frozenset({value})), None)
    return name or f"frozenset({{{json.dumps(value) if isinstance(value, str) else value}}})"


def _pieces(text: str) -> list[str]:
    """`text` cut between words, to be joined again by Python."""
    words = textwrap.wrap(text, WIDTH - 20, break_long_words=False, break_on_hyphens=False)
    return [*(f"{piece} " for piece in words[:-1]), words[-1]]


def _targets(spec: Spec) -> str:
    """A name of the table where it has one for this kind of card: an `a` twin is the same card."""
    for name in _TARGET_NAMES:
        if spec.arch in getattr(tiles, name):
            return name
    return _named(spec.arch)


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
                kernel_kind(one.split, one.pack_gqa))
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
