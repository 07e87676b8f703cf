"""What standard takes of the spec fields, and the one that tells its kernels apart."""
from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from flashgen.codegen.families.shared.forward import HEAD_DIMS
from flashgen.codegen.families.shared.kernels import KERNEL, Kernel, kernel_trait
from flashgen.codegen.spec.rule import Only

if TYPE_CHECKING:
    from flashgen.codegen.spec import fields

KERNELS: tuple[Kernel, ...] = ("scores", "softmax", "values")  # of a call, in their order


class Options:
    kernel: Annotated[Kernel | None, KERNEL] = None


if TYPE_CHECKING:
    class Spec(fields.Spec, Options):
        """A Spec of this family, as a type checker sees it."""


TRAITS = (kernel_trait(KERNELS[0]),)

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
