"""What fa1 takes of the spec fields, and the one that tells its backward kernels apart."""
from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from flashgen.codegen.families.shared.forward import HEAD_DIMS
from flashgen.codegen.families.shared.kernels import KERNEL, Kernel, kernel_trait
from flashgen.codegen.families.shared.sums import DETERMINISTIC
from flashgen.codegen.spec.rule import Only

if TYPE_CHECKING:
    from flashgen.codegen.spec import fields


class Options:
    deterministic: Annotated[bool, DETERMINISTIC] = False
    kernel: Annotated[Kernel | None, KERNEL] = None


if TYPE_CHECKING:
    class Spec(fields.Spec, Options):
        """A Spec of this family, as a type checker sees it."""


TRAITS = (kernel_trait(None),)

_FIRST = "it is the algorithm as first published"

ONLY = (
    *(Only(name, HEAD_DIMS, "what its tiles cover") for name in ("head_dim_qk", "head_dim_v")),
    Only("kv_layout", ("dense",), "a block has a head of one sequence, and all sequences one length"),
    Only("window", (False,), _FIRST),
    Only("batch_invariant", (False,), "it always is"),
    Only("deterministic", (False,), "its results always have the same bits: one block adds all sums of a head"),
    Only("lse", (True,), "a call leaves it out or not"),
    Only("align", ("bottom_right",), "it has no expressions"),
    Only("normalize", ("softmax",), _FIRST),
    *(Only(name, ("none",), _FIRST) for name in ("score", "mask", "sink")),
    *(Only(name, (None,), "its tiles follow from shared memory") for name in ("tile", "stages", "roles")),
)
