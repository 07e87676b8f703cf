"""The parameters of a call's spec, for attention and its gradients. Loads no specs for calls without."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashgen.runtime.ops.attention.dropout import Named, with_dropout

if TYPE_CHECKING:
    import torch

    from flashgen.codegen.families.shared.launch import Sizes
    from flashgen.runtime.ops.attention.parameters import Parameters
    from flashgen.runtime.select.params import Bound

# The text that names a spec, ints, floats and tensors of a call without one.
UNBOUND: Named = ("", (), (), ())


def bound_to_call(spec: Any, params: Any, dropout_p: Any, dropout_seed: torch.Tensor | None, device: torch.device
                  ) -> Named:
    """What UNBOUND is without all of this, from the arguments of flashgen.attention."""
    found = UNBOUND
    if spec is not None or params is not None:
        from flashgen.runtime.ops.attention.parameters import bound_to

        found = bound_to(spec, params)
    return with_dropout(found, dropout_p, dropout_seed, device)


def bound_parameters(text: str, bound: Bound, sizes: Sizes, varlen: bool, device: torch.device) -> Parameters:
    if (text, *bound) == UNBOUND:
        return "", {}, (), False
    from flashgen.runtime.ops.attention.parameters import read_parameters

    return read_parameters(text, bound, sizes, varlen, device)
