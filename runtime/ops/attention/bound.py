"""The parameters of a call's spec, for attention and its gradients. Loads no specs for calls without."""
from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from flashgen.codegen.families.shared.launch import Sizes
    from flashgen.runtime.ops.attention.parameters import Parameters
    from flashgen.runtime.select.params import Bound

# The text that names a spec, ints, floats and tensors of a call without one.
UNBOUND: tuple[str, tuple[int, ...], tuple[float, ...], tuple[torch.Tensor, ...]] = ("", (), (), ())


def bound_parameters(text: str, bound: Bound, sizes: Sizes, varlen: bool, device: torch.device) -> Parameters:
    if (text, *bound) == UNBOUND:
        return "", {}, (), False
    from flashgen.runtime.ops.attention.parameters import read_parameters

    return read_parameters(text, bound, sizes, varlen, device)
