"""plan -> source: Jinja over templates/, and the closure of headers the text reaches."""
from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2
import jinja2.sandbox

from flashgen.codegen.plan import CTYPES, Plan
from flashgen.codegen.slots import EXPRESSION_FLAGS, MASKS, ONE_LOOP, KvLoop
from flashgen.codegen.source import Source
from flashgen.codegen.wgmma import HEADER as WGMMA_HEADER
from flashgen.codegen.wgmma import render_wgmma
from flashgen.errors import TemplateError

if TYPE_CHECKING:
    from flashgen.codegen.spec.spec import Spec

TEMPLATES = Path(__file__).resolve().parent.parent / "templates"
_INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"', re.MULTILINE)


@functools.cache
def environment(root: Path = TEMPLATES) -> jinja2.Environment:
    return jinja2.sandbox.SandboxedEnvironment(
        loader=jinja2.FileSystemLoader(root), undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True, autoescape=False)


def render(plan: Plan) -> Source:
    """The CUDA text of a plan with the headers it reaches. Same plan, same bytes. Raises TemplateError."""
    try:
        template = environment().get_template(plan.template)
        text = template.render(plan=_view(plan), flags=_flags(plan), kv_loops=_kv_loops(plan),
                               **{slot: next((e for e in plan.expressions if e.slot == slot), None)
                                  for slot in ("score", "mask")},
                               slot_files=[f"slots/{slot}/{choice}.cuh.j2" for slot, choice in plan.slots])
    except jinja2.TemplateError as error:
        where = f"{getattr(error, 'filename', None) or plan.template}:{getattr(error, 'lineno', 0) or 0}"
        raise TemplateError(f"template does not render: {error.message}", where=where,
                            next="pytest tests/unit/test_templates.py checks all template rules") from error
    return source_of(plan, re.sub(r"\n{3,}", "\n\n", text).strip("\n") + "\n")


def source_of(plan: Plan, text: str) -> Source:
    """The text of a plan's kernel as a Source, with the headers it reaches as they are now. Raises TemplateError."""
    return Source(text=text, entry=plan.variant, file_name=f"{plan.kernel_name}.cu",
                  headers=reached_headers(text, _rendered_headers(plan)), arch=plan.target,
                  options=plan.compiler_options)


def _kv_loops(plan: Plan) -> tuple[KvLoop, ...]:
    loops = _loops_of_mask(plan)
    if _flags(plan)["summed"]:  # the weights are the scores
        return tuple(dataclasses.replace(loop, exact=False, stale=False) for loop in loops)
    return loops


def _loops_of_mask(plan: Plan) -> tuple[KvLoop, ...]:
    mask = dict(plan.slots).get("mask")
    if dict(plan.flags).get("one_loop"):
        return ONE_LOOP
    return MASKS[mask].loops.get(plan.family, ()) if mask else ()


def plan_and_source(spec: Spec) -> tuple[Plan, Source]:
    """Lowers and renders one variant. Raises PlanError or TemplateError."""
    from flashgen.codegen.families.registry import (
        lower,  # whoever renders a ready plan needs no specs, hence no pydantic
    )

    plan = lower(spec)
    return plan, render(plan)


def _flags(plan: Plan) -> dict[str, bool]:
    """The plan's flags, those that only variants with expressions have, and the opposites that stand for an else."""
    flags = dict.fromkeys(EXPRESSION_FLAGS, False) | dict(plan.flags)
    flags |= {opposite: not flags[flag] for flag, opposite in EXPRESSION_FLAGS.items() if opposite}
    two_sided = any(loop.leaves for loop in _loops_of_mask(plan))
    return flags | {"ranged_and_poisonable": flags["ranged"] and flags.get("poisonable", False),
                    "two_sided": two_sided, "one_sided": not two_sided}


def _view(plan: Plan) -> dict[str, object]:
    """The plan as templates see it: the same names, with CUDA types resolved, so that templates need no look-ups."""
    view: dict[str, object] = {name: getattr(plan, name) for name in plan.__dataclass_fields__}
    view["kernel_name"] = plan.kernel_name
    view["params_bytes"] = plan.params_bytes()
    view["params"] = [{"cuda_type": CTYPES[p.ctype].cuda, "name": p.name, "about": p.about} for p in plan.params]
    first = itertools.accumulate((b.count for b in plan.barriers), initial=0)
    view["barriers"] = [{**vars(b), "expects": b.expects, "first": place}
                        for b, place in zip(plan.barriers, first, strict=False)]
    view["roles"] = [{"name": r.name, "about": f"{r.warps} warps" + (
        f", {r.registers} registers per thread" if r.registers else "")} for r in plan.roles]
    return view


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
