"""The spec field that standard alone has, what it takes of the others, and the rule that it adds."""
from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from flashgen.codegen.families.family import Option, Trait
from flashgen.codegen.families.shared.forward import HEAD_DIMS
from flashgen.codegen.spec.rule import Only, Rule
from flashgen.errors import SpecError

if TYPE_CHECKING:
    from flashgen.codegen.spec import fields

KERNELS = ("scores", "softmax", "values")  # of a call, in their order


class Options:
    kernel: Annotated[Literal["scores", "softmax", "values"] | None, Option(
        "which of the three kernels of a call; a file lists them all", short=str)] = None


if TYPE_CHECKING:
    class Spec(fields.Spec, Options):
        """A Spec of this family, as a type checker sees it."""


TRAITS = (Trait("kernel", KERNELS[0], lambda wanted: (wanted,)),)

ONLY = (
    *(Only(name, HEAD_DIMS, "what its tiles cover") for name in ("head_dim_qk", "head_dim_v")),
    Only("kv_layout", ("dense",), "its score matrix is one for each sequence and head"),
    Only("window", (False,), "it computes all scores"),
    Only("batch_invariant", (False,), "it always is"),
    Only("lse", (True,), "a call leaves it out or not"),
    Only("align", ("bottom_right",), "it has no expressions"),
    Only("normalize", ("softmax",), "it is the baseline"),
    *(Only(name, ("none",), "it is the baseline") for name in ("score", "mask", "sink")),
    *(Only(name, (None,), "it has one tile") for name in ("tile", "stages", "roles")),
)


def _kernel(spec: Spec) -> SpecError | None:
    if spec.kernel is not None:
        return None
    return SpecError("kernel is null with family standard, a call of which launches three", where="Spec.kernel",
                     allowed=", ".join(KERNELS), nearest=f"kernel: [{', '.join(KERNELS)}]")


RULES = (Rule(f"`family: standard` has `kernel: [{', '.join(KERNELS)}]`.", _kernel),)
