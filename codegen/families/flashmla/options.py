"""The spec field that flashmla alone has, what it takes of the others, and the rules that it adds."""
from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from flashgen.codegen.families.family import Option, Trait
from flashgen.codegen.spec.rule import Only, Rule, refused, shown
from flashgen.errors import SpecError

if TYPE_CHECKING:
    from flashgen.codegen.spec import fields


class Options:
    page_size: Annotated[Literal[1, 64] | None, Option(
        "64: pages of any multiple of 64 rows, copied as boxes; 1: rows copied one by one, whatever the page", "rows",
        after="kv_layout")] = None


if TYPE_CHECKING:
    class Spec(fields.Spec, Options):
        """A Spec of this family, as a type checker sees it."""


# A kernel that gathers rows serves pages of any size; boxes are faster where they fit.
TRAITS = (Trait("page_size", None, lambda wanted: (64, 1) if wanted == 64 else (wanted,)),)

ONLY = (
    Only("head_dim_qk", (512, 576), "columns of the latent cache, without and with RoPE columns"),
    Only("head_dim_v", (512,), "a value is the first 512 columns of its key"),
    Only("kv_layout", ("dense", "paged"), "the forms of a cache"),
    Only("causal", (False,), "it comes with each call"),
    Only("window", (False,), "it has none"),
    Only("lse", (True,), "a call leaves it out or not"),
    Only("batch_invariant", (False,), "the schedule cuts a request according to the others"),
    Only("score", ("none",), "its scores are as they come"),
    Only("mask", ("none",), "causal comes with each call"),
    Only("align", ("bottom_right",), "it has no expressions"),
    Only("sink", ("none",), "it comes with each call"),
    Only("normalize", ("softmax",), "it has no expressions"),
    Only("tile", (None,), "it has one"),
    Only("stages", (None,), "its tile decides"),
    Only("roles", (None,), "its tile decides"),
)

# Pass schedule has one variant, since its kernel reads nothing that these fields speak of.
SCHEDULE: tuple[tuple[str, Any], ...] = (
    ("dtype", "bf16"), ("head_dim_qk", 576), ("kv_layout", "paged"), ("page_size", 64))


def _pages(spec: Spec) -> SpecError | None:
    paged = spec.kv_layout == "paged"
    if paged == (spec.page_size is not None):
        return None
    return refused("page_size", spec.page_size, f"kv_layout {spec.kv_layout}", "1, 64" if paged else "null",
                   "64" if paged else "null", f"kv_layout: {spec.kv_layout}")


def _schedule(spec: Spec) -> SpecError | None:
    for name, value in SCHEDULE if spec.pass_ == "schedule" else ():
        if getattr(spec, name) != value:
            return refused(name, getattr(spec, name), "pass schedule, whose one kernel serves all", shown(value),
                           shown(value), "pass: schedule")
    return None


RULES = (
    Rule("`page_size` is given with `kv_layout: paged`, and only then.", _pages),
    Rule("`pass: schedule` has one variant: " + ", ".join(f"`{name}: {value}`" for name, value in SCHEDULE) + ".",
         _schedule),
)
