"""Spec files: YAML in which any field may be a list -> the tuple of scalar Specs that it stands for.

Order of work: lists -> product in table order -> `exclude` -> `overrides` -> one checked Spec per variant.
The values of a file are checked once each, before the product, so that 500 variants cost no more than their Specs.
"""
from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import ConfigDict, TypeAdapter, ValidationError

from flashgen.codegen.spec import expressions as spec_expr
from flashgen.codegen.spec.docs import fields_markdown, json_schema
from flashgen.codegen.spec.fields import (
    Roles,
    Row,
    Spec,
    Tile,
    allowed,
    closest,
    problems_of,
    rows,
    rows_by_name,
    unknown_key,
)
from flashgen.codegen.spec.show import show
from flashgen.codegen.spec.yaml_tree import Node, from_python, read_yaml
from flashgen.errors import SpecError, together
from flashgen.files import show_path

__all__ = ["MAX_VARIANTS", "Roles", "Spec", "SpecFile", "Tile", "fields_markdown", "json_schema", "load_specs",
           "shipped_spec_paths", "spec_path", "specs_from_mapping", "variant_spec_paths"]

MAX_VARIANTS = 4096  # of the product before `exclude`


@dataclass(frozen=True)
class SpecFile:
    path: Path
    name: str
    specs: tuple[Spec, ...]


class _Choice(NamedTuple):
    """One checked value of a field, and where it was written."""

    value: Any
    node: Node


class _Match(NamedTuple):
    """A partial match: a variant fits if, for every field, its value is among the choices."""

    fields: dict[str, list[_Choice]]
    node: Node

    def fits(self, variant: dict[str, _Choice]) -> bool:
        return all(any(variant[name].value == c.value for c in wanted) for name, wanted in self.fields.items())


class _Override(NamedTuple):
    when: _Match
    set: dict[str, _Choice]


def shipped_spec_paths() -> tuple[Path, ...]:
    """The spec files whose kernels serve any call, sorted by name."""
    return tuple(sorted((Path(__file__).resolve().parents[2] / "specs").glob("*.yaml")))


def variant_spec_paths() -> tuple[Path, ...]:
    """The spec files that come with flashgen for calls that name them, sorted by name."""
    return tuple(sorted((Path(__file__).resolve().parents[2] / "specs" / "variants").glob("*.yaml")))


def spec_path(spec: str | os.PathLike[str]) -> Path:
    """The shipped file of this name; else the path as it is given. With .yaml a name is a path first, so that a copy
    in the working directory counts; a folder with the name of a spec hides nothing."""
    path = _as_path(spec)
    named = [p for p in (*shipped_spec_paths(), *variant_spec_paths()) if os.fspath(spec) in (p.name, p.stem)]
    return named[0] if named and (os.fspath(spec) == named[0].stem or not os.path.exists(path)) else path


def _as_path(spec: object) -> Path:
    if not isinstance(spec, (str, os.PathLike)):
        raise SpecError(f"a spec file is {show(spec)}", where="spec", allowed="a path, or the name of a shipped spec")
    return Path(spec)


def load_specs(path: str | os.PathLike[str]) -> SpecFile:
    """All variants of a spec file. Raises SpecError with file:line:column, and nothing else."""
    file = _as_path(path)
    try:
        root, problems = read_yaml(file)
    except FileNotFoundError:
        shipped = [p.name if file.suffix else p.stem for p in (*shipped_spec_paths(), *variant_spec_paths())]
        near = {name: name for name in shipped} | {p.name: show_path(p) for p in _files_beside(file)}
        raise SpecError("no such file", where=show_path(file),
                        allowed="a YAML file with spec fields, or the name of a shipped spec",
                        nearest=near.get(closest(file.name, near), ""), next="flashgen list") from None
    specs = _specs(root, problems)
    return SpecFile(file, specs[0].name, specs)


def specs_from_mapping(mapping: Mapping[str, Any], where: str = "spec") -> tuple[Spec, ...]:
    """As load_specs, from what YAML would give: dicts, lists or tuples, and scalars. Raises SpecError only."""
    return _specs(from_python(mapping, where), [])


def _files_beside(path: Path) -> list[Path]:
    try:
        return sorted(path.parent.glob("*.yaml"))
    except OSError:
        return []


def _specs(root: Node, problems: list[SpecError]) -> tuple[Spec, ...]:
    if not isinstance(root.value, dict):
        raise SpecError(f"a spec file holds {show(root.value)}", where=root.where, allowed="a mapping of spec fields")
    axes, excludes, overrides = _Reader(problems).file(root)
    if problems:
        raise together(problems)
    size = math.prod(len(axis) for axis in axes.values())
    if size > MAX_VARIANTS:
        longest = max(axes, key=lambda name: len(axes[name]))
        factors = " * ".join(f"{len(axis)} ({name})" for name, axis in axes.items() if len(axis) > 1)
        raise SpecError(f"{factors} = {size} variants before exclude", where=root.value[longest].where,
                        allowed=f"at most {MAX_VARIANTS} in a file", next="split the file; the name may stay the same")
    product = [dict(zip(axes, combination, strict=True)) for combination in itertools.product(*axes.values())]
    for variant in product:
        if variant["head_dim_v"].value is None:  # resolved first, so that excludes can name it
            variant["head_dim_v"] = variant["head_dim_v"]._replace(value=variant["head_dim_qk"].value)
    kept = _without(product, excludes, root)
    return _finish(kept, overrides)


def _without(product: list[dict[str, _Choice]], excludes: list[_Match], root: Node) -> list[dict[str, _Choice]]:
    for match in excludes:
        _require_a_hit(match, product, "exclude")
    kept = [variant for variant in product if not any(match.fits(variant) for match in excludes)]
    if not kept:
        raise SpecError("exclude leaves no variant", where=root.value["exclude"].where, allowed="at least one")
    return kept


def _finish(kept: list[dict[str, _Choice]], overrides: list[_Override]) -> tuple[Spec, ...]:
    changes: list[dict[str, _Choice]] = [{} for _ in kept]
    for override in overrides:
        _require_a_hit(override.when, kept, "overrides")
        for variant, change in zip(kept, changes, strict=True):
            if override.when.fits(variant):
                change.update(override.set)
    specs: list[Spec] = []
    seen: dict[tuple[str, str], dict[str, _Choice]] = {}  # what was set in the variant of this name
    for variant, change in zip(kept, changes, strict=True):
        choices = variant | change
        try:
            spec = Spec(**{name: choice.value for name, choice in choices.items()})
        except SpecError as error:  # a rule between fields: `where` names the one to point at, or a part of it
            place, _, column = error.where.partition(":")
            field, *part = place.split(".")[1:]
            where, _ = _locate(choices[field].node, tuple(part), False)
            raise SpecError(error.what, where=where + (f":{column}" if column else ""), allowed=error.allowed,
                            nearest=error.nearest, next=error.next) from None
        key = (spec.variant, spec.arch)
        if key in seen:
            blame = next(iter((*change.values(), *seen[key].values(), choices["head_dim_v"])))
            raise SpecError(f"{spec.variant}.{spec.arch} is there twice", where=blame.node.where,
                            allowed="each variant once", next="exclude one of the two")
        seen[key] = change
        specs.append(spec)
    for name in spec_expr.unused(tuple(specs)):
        where, _ = _locate(kept[0]["params"].node, (name,), True)
        raise SpecError(f"parameter {name} is read by no variant", where=where, allowed="parameters that are used",
                        next="use it in score or mask, or leave it out")
    return tuple(specs)


def _require_a_hit(match: _Match, variants: list[dict[str, _Choice]], what: str) -> None:
    """Refuse a match that fits no variant, and a value in it that no fitting variant has: both are slips."""
    hits = [variant for variant in variants if match.fits(variant)]
    if not hits:
        raise SpecError(f"this entry of {what} matches no variant", where=match.node.where,
                        allowed="an entry that matches at least one variant", nearest=_nearest_match(match, variants))
    for name, wanted in match.fields.items():
        present = {variant[name].value for variant in hits}
        for choice in wanted:
            if choice.value not in present:
                raise SpecError(f"{name} {show(choice.value)} in this entry of {what} matches no variant",
                                where=choice.node.where, allowed=", ".join(sorted(map(show, present))))


def _nearest_match(match: _Match, variants: list[dict[str, _Choice]]) -> str:
    """The fields of the entry, with the values of the variant that agrees with it most."""
    best = max(variants, key=lambda v: sum(v[name].value in [c.value for c in cs] for name, cs in match.fields.items()))
    return "{" + ", ".join(f"{name}: {show(best[name].value)}" for name in match.fields) + "}"


class _Reader:
    """Checks every value of a file and collects what is wrong, so that one run reports all of it."""

    def __init__(self, problems: list[SpecError]) -> None:
        self.problems = problems

    def refuse(self, what: str, where: str, allowed: str) -> None:
        self.problems.append(SpecError(what, where=where, allowed=allowed))

    def file(self, root: Node) -> tuple[dict[str, list[_Choice]], list[_Match], list[_Override]]:
        known = [row.name for row in rows()]
        for key, entry in root.value.items():
            if key not in (*known, "exclude", "overrides"):
                self.problems.append(unknown_key(key, [*known, "exclude", "overrides"], entry.where))
        axes = {}
        for row in rows():
            if row.name in root.value:
                axes[row.name] = self.choices(row, root.value[row.name].node)
            elif row.required:
                self.refuse(f"{row.name} is missing", root.where, allowed(row))
            else:
                axes[row.name] = [_Choice(row.default, root)]
        if len(axes.get("name", ())) > 1:
            self.refuse("name is a list", root.value["name"].node.where, "one name in a file")
        excludes = [match for node in self.entries(root, "exclude") if (match := self.match(node, "exclude"))]
        overrides = [self.override(node) for node in self.entries(root, "overrides")]
        return axes, excludes, [o for o in overrides if o]

    def entries(self, root: Node, key: str) -> list[Node]:
        if key not in root.value:
            return []
        node = root.value[key].node
        if isinstance(node.value, list) and node.value:
            return node.value
        what = "empty" if node.value == [] else show(node.value)
        self.refuse(f"{key} is {what}", node.where, "a list of mappings; leave the key out if there is none")
        return []

    def match(self, node: Node, what: str) -> _Match | None:
        known = [row.name for row in rows()]
        return _Match({row.name: self.choices(row, entry) for row, entry in self.fields(node, what, known)}, node)

    def override(self, node: Node) -> _Override | None:
        if not isinstance(node.value, dict) or node.value.keys() != {"when", "set"}:
            self.refuse("this entry of overrides is not {when: ..., set: ...}", node.where,
                        "{when: {field: value, ...}, set: {field: value, ...}}")
            return None
        when = self.match(node.value["when"].node, "when")
        names = [row.name for row in rows() if row.override]
        values = {row.name: self.choice(row, entry) for row, entry in self.fields(node.value["set"].node, "set", names)}
        return _Override(when, {name: c for name, c in values.items() if c}) if when else None

    def fields(self, node: Node, what: str, known: list[str]) -> Iterator[tuple[Row, Node]]:
        if not isinstance(node.value, dict) or not node.value:
            self.refuse(f"{what} is {show(node.value) if node.value else 'empty'}", node.where,
                        "a mapping of one or more of " + ", ".join(known))
            return
        for key, entry in node.value.items():
            if key in known:
                yield rows_by_name()[key], entry.node
            else:
                self.problems.append(unknown_key(key, known, entry.where))

    def choices(self, row: Row, node: Node) -> list[_Choice]:
        """The values of a field: those of a list, or the one. Those refused are left out, and reported."""
        if not isinstance(node.value, list):
            return [choice for choice in [self.choice(row, node)] if choice]
        if not node.value:
            self.refuse(f"{row.name} is an empty list", node.where, f"one or more of: {allowed(row)}")
        found: list[_Choice] = []
        for item in node.value:
            choice = self.choice(row, item)
            if choice and any(choice.value == other.value for other in found):
                self.refuse(f"{row.name} lists {show(choice.value)} twice", item.where, "each value once")
            elif choice:
                found.append(choice)
        return found

    def choice(self, row: Row, node: Node) -> _Choice | None:
        if node.value is None and row.nullable:
            return _Choice(None, node)
        try:
            value = _whole(node) if row.name == "params" else _plain(node)
            return _Choice(_adapter(row.name).validate_python(value), node)
        except SpecError as error:  # of a parameter: `where` is Spec.params.name.key
            where, note = _locate(node, tuple(error.where.split(".")[2:]), False)
            self.problems.append(SpecError(error.what + note, where=where, allowed=error.allowed,
                                           nearest=error.nearest, next=error.next))
            return None
        except ValidationError as error:
            self.problems += problems_of(error, functools.partial(_locate, node), row.name)
            return None


@functools.cache
def _adapter(name: str) -> TypeAdapter[Any]:
    info = Spec.model_fields[rows_by_name()[name].attribute]
    config = None if rows_by_name()[name].parts else ConfigDict(strict=True)  # models bring their own
    # not `info` itself: its alias belongs to the model
    parts = (info.annotation, "", *info.metadata)
    return TypeAdapter(Annotated[parts], config=config)  # type: ignore[arg-type]


def _plain(node: Node) -> Any:
    """Without places, for pydantic. A value is a scalar or a mapping of scalars: nothing deeper is looked at."""
    def scalar(value: Any) -> Any:
        return type(value)() if isinstance(value, (dict, list)) else value
    if isinstance(node.value, dict):
        return {key: scalar(entry.node.value) for key, entry in node.value.items()}
    return scalar(node.value)


def _whole(node: Node) -> Any:
    """A value of any depth without places."""
    if isinstance(node.value, dict):
        return {key: _whole(entry.node) for key, entry in node.value.items()}
    return [_whole(item) for item in node.value] if isinstance(node.value, list) else node.value


def _locate(node: Node, loc: tuple[str, ...], key: bool) -> tuple[str, str]:
    """(where, note) of a part of a value, or of its key; of the innermost that there is if the part is missing."""
    entry = node.value.get(loc[0]) if loc and isinstance(node.value, dict) else None
    if entry is None:
        return node.where, node.note
    if len(loc) > 1:
        return _locate(entry.node, loc[1:], key)
    return (entry.where, "") if key else (entry.node.where, entry.node.note)
