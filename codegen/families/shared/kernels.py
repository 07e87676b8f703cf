"""The spec field of passes that launch several kernels a call: which of them a variant is."""
from __future__ import annotations

from typing import Literal

from flashgen.codegen.families.family import Option, Trait

Kernel = Literal["scores", "softmax", "values", "preprocess", "gradients", "postprocess", "key_gradients",
                 "query_gradients"]

KERNEL = Option("which of the kernels of a call, where a pass launches several; a file lists them all", short=str)


def kernel_trait(first: Kernel | None) -> Trait:
    """`first`: of the family's forward pass, None where that has one kernel."""
    return Trait("kernel", first, lambda wanted: (wanted,))


def named(*kernels: Kernel) -> tuple[tuple[tuple[str, Kernel], ...], ...]:
    """Pass.kernels of a pass whose kernels differ in this field alone."""
    return tuple((("kernel", kernel),) for kernel in kernels)
