"""plan -> source: Jinja over templates/, and the closure of headers the text reaches."""
from __future__ import annotations

import functools
import itertools
import re
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2
import jinja2.sandbox

from flashgen.codegen.families.registry import loops_of
from flashgen.codegen.plan import CTYPES, Expression, Param, Part, Plan
from flashgen.codegen.slots import PIECES, RARE_CHOICES, RARE_FLAGS, SLOTS
from flashgen.codegen.source import Source
from flashgen.codegen.wgmma import HEADER as WGMMA_HEADER
from flashgen.codegen.wgmma import render_wgmma
from flashgen.errors import TemplateError

if TYPE_CHECKING:
    from flashgen.codegen.spec.spec import Spec

TEMPLATES = Path(__file__).resolve().parent.parent / "templates"
BANNER_COLS, EXPRESSION_COLS = 107, 72
_COMMENTS = {"cu": "//", "py": "#"}
_ANNOTATIONS = {"i64": ": tl.int64", "i32": ": tl.int32", "f32": ": tl.float32"}  # pointers bring their types
_INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"', re.MULTILINE)


@functools.cache
def environment(root: Path = TEMPLATES) -> jinja2.Environment:
    return jinja2.sandbox.SandboxedEnvironment(
        loader=jinja2.FileSystemLoader(root), undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True, autoescape=False)


def render(plan: Plan) -> Source:
    """The text of a plan with the headers it reaches. Same plan, same bytes. Raises TemplateError."""
    loops = loops_of(plan)
    alternating = any(loop.may_reach_end for loop in loops)
    choices = {**RARE_CHOICES, **dict(plan.slots), "loops": "alternating" if alternating else "in_turn"}
    try:
        template = environment().get_template(plan.template)
        text = template.render(plan=_view(plan), flags=dict.fromkeys(RARE_FLAGS, False) | dict(plan.flags),
                               kv_loops=loops,
                               **{e.slot: _wrapped(e, _COMMENTS[plan.language]) for e in plan.expressions},
                               **{slot: _pieces(plan.family, slot, choice) for slot, choice in choices.items()
                                  if slot in PIECES},
                               slot_files=[f"slots/{slot}/{choice}.cuh.j2" for slot, choice in plan.slots
                                           if slot in SLOTS])
    except jinja2.TemplateError as error:
        where = f"{getattr(error, 'filename', None) or plan.template}:{getattr(error, 'lineno', 0) or 0}"
        raise TemplateError(f"template does not render: {error.message}", where=where,
                            next="pytest tests/unit/test_templates.py checks all template rules") from error
    return source_of(plan, re.sub(r"\n{3,}", "\n\n", text).strip("\n") + "\n")


def source_of(plan: Plan, text: str) -> Source:
    """The text of a plan's kernel as a Source, with the headers it reaches as they are now. Raises TemplateError."""
    return Source(text=text, entry=plan.variant, file_name=f"{plan.kernel_name}.{plan.language}",
                  headers=reached_headers(text, _rendered_headers(plan)), arch=plan.target,
                  options=plan.compiler_options)


@functools.cache
def _pieces(family: str, slot: str, choice: str) -> Mapping[str, str]:
    """Name of a piece -> its template, for `{% include slot.name %}`."""
    folder = TEMPLATES / family / slot / choice
    return {path.name.partition(".")[0]: path.relative_to(TEMPLATES).as_posix() for path in folder.glob("*.j2")}


def plan_and_source(spec: Spec) -> tuple[Plan, Source]:
    """Lowers and renders one variant. Raises PlanError or TemplateError."""
    from flashgen.codegen.families.registry import (
        lower,  # whoever renders a ready plan needs no specs, hence no pydantic
    )

    plan = lower(spec)
    return plan, render(plan)


def _view(plan: Plan) -> dict[str, object]:
    """The plan as templates see it: the same names, with CUDA types resolved, so that templates need no look-ups."""
    view: dict[str, object] = {name: getattr(plan, name) for name in plan.__dataclass_fields__}
    view["kernel_name"] = plan.kernel_name
    view["params_bytes"] = plan.params_bytes()
    view["banner"] = _banner(plan)
    if plan.language == "py":
        # `reads`: what masks and scores may read, in lines. `batched`: tensors with a stride for sequences. Strides
        # and pointers are what Triton compiles anew for, where 16 divides them.
        view["arguments"] = [{"text": p.name + _ANNOTATIONS.get(p.ctype, ""), "about": p.about} for p in plan.params]
        numbers = [p.name for p in plan.params if p.name.startswith("user_") or p.ctype in ("i32", "f32", "f32_sum")]
        view["reads"] = textwrap.wrap(", ".join(numbers) + ",", BANNER_COLS - 10)
        of_batch = "_batch_stride"
        view["batched"] = [p.name.removesuffix(of_batch) for p in plan.params if p.name.endswith(of_batch)]
        view["unspecialized"] = [p.name for p in plan.params if p.ctype in ("i32", "f32")]
    view["params"] = [{"cuda_type": kind, "names": ", ".join(p.name for p in params), "about": about}
                      for (kind, about, _), params in itertools.groupby(plan.params, _line_of)]
    first = itertools.accumulate((b.count for b in plan.barriers), initial=0)
    view["barriers"] = [{**vars(b), "expects": b.expects, "first": place}
                        for b, place in zip(plan.barriers, first, strict=False)]
    return view


def _wrapped(expression: Expression, comment: str) -> Expression:
    """With its texts broken into lines: code wherever there is a space, and the comment behind its sign."""
    def code(text: str) -> str:
        return ("\n" + 10 * " ").join(textwrap.wrap(text, EXPRESSION_COLS, break_long_words=False,
                                                   break_on_hyphens=False))

    def parts(found: tuple[Part, ...]) -> tuple[Part, ...]:
        return tuple(replace(part, text=code(part.text)) for part in found)

    e = expression
    return replace(
        e, about=code(e.about).replace("\n", f"\n{comment}"),
        uniform=parts(e.uniform), row=parts(e.row), column=parts(e.column),
        rest=code(e.rest), whole=code(e.whole), slope=code(e.slope), tile_class=code(e.tile_class),
        class_rows=parts(e.class_rows),
        terms=tuple(replace(term, factor=code(term.factor), element=code(term.element)) for term in e.terms),
        first=tuple(map(code, e.first)), last=tuple(map(code, e.last)))


def _line_of(param: Param) -> tuple[str, str, str]:
    """Parameters that have this in common stand on one line: the strides of a tensor."""
    tensor = param.name.split("_")[0]
    return CTYPES[param.ctype].cuda, param.about, tensor if param.name.endswith("_stride") else param.name


def _banner(plan: Plan) -> list[str]:
    """What was asked for and what was chosen, in lines of a comment, without spec fields that are not set or false."""
    roles = [f"{r.name} {r.warps} warps" + (f" of {r.registers} registers per thread" if r.registers else "")
             for r in plan.roles]
    rows = {"spec": [f"{name} {value}" for name, value in plan.spec if value not in (None, False)],
            "slots": [f"{slot} {choice}" for slot, choice in plan.slots],
            "roles": roles, "grid": [plan.launch.grid]}
    texts = [f"{name}: {'; '.join(words)}" for name, words in rows.items() if words] + [*plan.notes]
    return [line for text in texts for line in textwrap.wrap(
        text, BANNER_COLS, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)]


def _rendered_headers(plan: Plan) -> dict[str, str]:
    return {WGMMA_HEADER: render_wgmma(plan.wgmma_shapes)} if plan.wgmma_shapes else {}


def reached_headers(text: str, rendered: Mapping[str, str] | None = None) -> tuple[tuple[str, str], ...]:
    """(include name, text) of every header that `text` reaches, sorted by name. `rendered`: those without a file."""
    rendered = rendered or {}
    reached: dict[str, str] = {}
    waiting = _INCLUDE.findall(text)
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached[name] = rendered.get(name) or header_text(name)
            waiting += _INCLUDE.findall(reached[name])
    return tuple(sorted(reached.items()))


@functools.cache
def header_text(name: str) -> str:
    path = TEMPLATES / "include" / name
    if not path.is_file():
        raise TemplateError(f"no header {name}", where=str(path.relative_to(TEMPLATES)),
                            allowed="files below templates/include")
    return path.read_text(encoding="utf-8")
