"""Spec fields of triton, the trait that tells its kernels apart, and what it takes of the common fields."""
from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from flashgen.codegen.families.shared.forward import HEAD_DIMS
from flashgen.codegen.families.shared.kernels import KERNEL, Kernel, kernel_trait
from flashgen.codegen.spec.rule import Only, Rule
from flashgen.errors import SpecError

if TYPE_CHECKING:
    from flashgen.codegen.spec import fields

FORWARD = "fwd"
BACKWARD: tuple[Kernel, ...] = ("preprocess", "key_gradients", "query_gradients")  # of a call, in their order


class Options:
    kernel: Annotated[Kernel | None, KERNEL] = None


if TYPE_CHECKING:
    class Spec(fields.Spec, Options):
        """A Spec of this family, as a type checker sees it."""


TRAITS = (kernel_trait(None),)

ONLY = (
    *(Only(name, HEAD_DIMS, "what its tiles cover") for name in ("head_dim_qk", "head_dim_v")),
    Only("kv_layout", ("dense", "varlen")),
    Only("batch_invariant", (False,), "its kernels always are"),
)

BACKWARD_ONLY = (
    Only("lse", (True,), "it reads lse"),
    Only("normalize", ("softmax",), "it recomputes P from lse"),
)


def _powers(spec: Any) -> SpecError | None:
    for side, size in (spec.tile or ()):
        if size & (size - 1):
            down = 1 << size.bit_length() - 1
            return SpecError(f"tile.{side} is {size}, and blocks of Triton have a power of two",
                             where=f"Spec.tile.{side}", allowed="16, 32, 64, 128, 256", nearest=str(down))
    return None


def _warps(spec: Any) -> SpecError | None:
    if spec.roles is None or spec.roles.mma & (spec.roles.mma - 1) == 0:
        return None
    return SpecError(f"roles.mma is {spec.roles.mma}, and a block of Triton has a power of two of warps",
                     where="Spec.roles.mma", allowed="1, 2, 4, 8, 16",
                     nearest=str(1 << spec.roles.mma.bit_length() - 1))


RULES = (Rule("`tile.m` and `tile.n` are powers of two.", _powers), Rule("`roles.mma` is a power of two.", _warps))
