"""The template rules, checked over the Jinja syntax tree and the text. `pytest tests/unit/test_templates.py` runs them.

Python decides how many, the choice of a file decides what: so templates may include, loop and test a bare boolean, and
nothing else. Inline PTX lives in the PTX wrappers, one instruction per function.
"""
from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import jinja2
from jinja2 import nodes

from flashgen.codegen.render import TEMPLATES, environment
from flashgen.codegen.slots import PIECES, SLOTS

MACROS = "macros/plan.j2"
MAX_DEPTH = 2
# Budgets that keep a file a page of a book. Raising one is a change to review.
MAX_LINES = {"skeleton": 300, "header": 200, "slot": 105}

_STATEMENTS = (nodes.Template, nodes.Output, nodes.TemplateData, nodes.Include, nodes.For, nodes.If, nodes.Import)
_EXPRESSIONS = (nodes.Name, nodes.Getattr, nodes.Const, nodes.Tuple)
_IN_MACROS = (nodes.Macro,)
_CALLS = (nodes.Call,)  # of the macros only
_LAYOUT = "indent"      # the one filter: it moves lines to where they stand, and changes none


def lint(root: Path = TEMPLATES) -> list[str]:
    """Every breach of the rules as `file:line: what`; empty when all is well."""
    found: list[str] = []
    for path in sorted(root.rglob("*.j2")):
        found += _lint_template(path, path.relative_to(root).as_posix())
    for path in sorted((root / "include").rglob("*.cuh")):
        found += _lint_header(path, path.relative_to(root).as_posix())
    return [*found, *_lint_slots(root), *_lint_pieces(root)]


def _lint_template(path: Path, name: str) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    yield from _budget(text, name, "slot" if name.startswith("slots/") else "skeleton")
    for number, line in enumerate(text.splitlines(), 1):
        tags = re.findall(r"\{%.*?%\}", line)
        if tags and line.strip() != tags[0]:
            yield f"{name}:{number}: a tag shares its line"
    if re.search(r"\basm\b", text):
        yield f"{name}: inline PTX outside include/flashgen/ptx"
    try:
        tree = environment().parse(text)
    except jinja2.TemplateSyntaxError as error:
        yield f"{name}:{error.lineno}: {error.message}"
        return
    yield from _walk(tree, name, 0)


def _walk(node: nodes.Node, name: str, depth: int) -> Iterator[str]:
    in_macros = name == MACROS
    allowed = _STATEMENTS + _EXPRESSIONS + _CALLS + (_IN_MACROS if in_macros else ())
    where = f"{name}:{node.lineno}"
    if isinstance(node, nodes.FilterBlock) and node.filter.name == _LAYOUT:
        for child in node.body:
            yield from _walk(child, name, depth)
        return
    if not isinstance(node, allowed):
        yield f"{where}: {type(node).__name__} is not allowed: numbers and choices belong to the plan"
    if isinstance(node, nodes.If):
        if node.elif_ or node.else_:
            yield f"{where}: elif and else are not allowed: a second alternative is a slot"
        if not isinstance(node.test, (nodes.Name, nodes.Getattr)):
            yield f"{where}: only a bare boolean may be tested"
    if isinstance(node, nodes.Import) and getattr(node.template, "value", None) != MACROS:
        yield f"{where}: only {MACROS} may be imported"
    if isinstance(node, (nodes.For, nodes.If)):
        depth += 1
        if depth > MAX_DEPTH:
            yield f"{where}: nested deeper than {MAX_DEPTH}"
    for child in node.iter_child_nodes():
        yield from _walk(child, name, depth)


def _lint_header(path: Path, name: str) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    yield from _budget(text, name, "header")
    code = re.sub(r"//.*", "", text)
    if "#pragma once" not in code:
        yield f"{name}: no #pragma once"
    if "/ptx/" not in name and re.search(r"\basm\b", code):
        yield f"{name}: inline PTX outside include/flashgen/ptx"
    for function in re.split(r"\bFG_DEVICE\b", code)[1:]:
        if len(re.findall(r"\basm\b", function)) > 1:
            yield f"{name}: more than one instruction in {function.split('(')[0].split()[-1]}"
    for include in re.findall(r'#include\s+["<]([^">]+)[">]', code):
        if not include.startswith("flashgen/") and include != "stdint.h":
            yield f"{name}: includes {include} from outside"


def _lint_slots(root: Path) -> Iterator[str]:
    files = {path.relative_to(root / "slots").as_posix() for path in (root / "slots").rglob("*.j2")}
    expected = {f"{slot}/{choice}.cuh.j2" for slot, choices in SLOTS.items() for choice in choices}
    for name in sorted(files ^ expected):
        yield f"slots/{name}: {'has no row in slots.py' if name in files else 'is missing'}"
    for name in sorted(files & expected):
        slot, choice = name.removesuffix(".cuh.j2").split("/")
        first = (root / "slots" / name).read_text(encoding="utf-8").splitlines()[0]
        if not first.startswith(f"// {slot}: {choice}."):
            yield f"slots/{name}:1: must open with `// {slot}: {choice}.`"


def _lint_pieces(root: Path) -> Iterator[str]:
    for slot, choices in PIECES.items():
        for folder in sorted(path for path in root.glob(f"*/{slot}") if path.is_dir() and path.parent.name != "slots"):
            pieces = {choice.name: {path.name for path in choice.glob("*.j2")} for choice in folder.iterdir()}
            name = folder.relative_to(root).as_posix()
            for choice in sorted(pieces.keys() ^ set(choices)):
                yield f"{name}/{choice}: {'has no row in slots.py' if choice in pieces else 'is missing'}"
            for missing in sorted({f"{choice}/{piece}" for choice in pieces for piece in set().union(*pieces.values())
                                   if piece not in pieces[choice]}):
                yield f"{name}/{missing}: is missing: all choices of a slot have the same pieces"


def _budget(text: str, name: str, kind: str) -> Iterator[str]:
    lines = text.count("\n")
    if lines > MAX_LINES[kind]:
        yield f"{name}: {lines} lines, a {kind} has at most {MAX_LINES[kind]}"
