"""`flashgen list` and `flashgen schema`: what can be built, and what a spec may say."""
from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from flashgen.cli.common import Archs, Output, Table, Variants, command, select
from flashgen.errors import EnvironmentError_

if TYPE_CHECKING:
    from flashgen.codegen.spec.spec import Spec

_T = TypeVar("_T")


def register(app: typer.Typer) -> None:
    command(app, list_, "list")
    command(app, schema)


def list_(spec: Annotated[str | None, typer.Argument(metavar="[SPEC]", help="List the variants of this one.")] = None,
          arch: Archs = None, variant: Variants = None) -> Output:
    """List the shipped spec files, or the variants of one spec. Needs neither torch nor a GPU."""
    from flashgen.codegen.spec.spec import load_specs, shipped_spec_paths, variant_spec_paths

    if spec is not None:
        return _variants(select([spec], arch, variant))
    if arch or variant:
        raise typer.BadParameter("--arch and --variant need a SPEC")
    rows: list[dict[str, Any]] = []
    for path in (*shipped_spec_paths(), *variant_spec_paths()):
        specs, by_name = load_specs(path).specs, path.parent.name == "variants"
        rows.append({"file": f"variants/{path.name}" if by_name else path.name, "by_name_only": by_name,
                     "name": path.stem, "families": _unique(s.family for s in specs),
                     "pass": specs[0].pass_,
                     "variants": len(specs), "archs": _unique(s.arch for s in specs),
                     "head_dims": [list(d) for d in _unique((s.head_dim_qk, s.head_dim_v) for s in specs)],
                     "dtypes": _unique(s.dtype for s in specs)})
    table = Table(("file", "family", ">variants", "archs", "head dims", "dtypes"),
                  [(r["file"], f"{' '.join(r['families'])} {r['pass']}", r["variants"], " ".join(r["archs"]),
                    " ".join(str(qk) if qk == v else f"({qk}, {v})" for qk, v in r["head_dims"]),
                    " ".join(r["dtypes"])) for r in rows])
    return Output(rows, [table, "\nvariants/ serve calls that name them, spec=NAME, and no others: docs/variants.md.\n"
                         "flashgen list NAME lists the variants of one; flashgen check NAME shows its expressions, "
                         "flashgen explain NAME describes one."])


def _variants(specs: list[Spec]) -> Output:
    archs: dict[str, list[str]] = {}
    for spec in specs:
        archs.setdefault(spec.variant, []).append(spec.arch)
    data = [{"variant": spec.variant, "arch": spec.arch, **dict(spec.fields())} for spec in specs]
    return Output(data, [Table(("variant", "archs"), [(name, " ".join(found)) for name, found in archs.items()])])


def _unique(values: Iterable[_T]) -> list[_T]:
    return list(dict.fromkeys(values))


def schema(out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write it there.")] = None,
           docs: Annotated[bool, typer.Option("--docs", help="The page specs/README.md instead.")] = False) -> Output:
    """Print the JSON schema of spec files for editors, or the page that documents their fields."""
    from flashgen.codegen.spec.spec import fields_markdown, json_schema

    data = {"markdown": fields_markdown()} if docs else json_schema()
    text = data["markdown"].rstrip("\n") if docs else json.dumps(data, indent=1)
    if out is None:
        return Output(data, [text])
    try:
        out.write_text(text + "\n", encoding="utf-8")
    except OSError as err:
        raise EnvironmentError_(f"cannot be written ({err.strerror})", where=str(out)) from err
    return Output({"written": str(out)}, [f"wrote {out}"])
