"""The key of a call in the memo, by a function that is written out for each signature, as dataclasses write theirs: a
loop over the tensors would take a microsecond of each call."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from flashgen.runtime.ops.signature import Options, Signature, Tensors

# (addresses of the tensors and of `out`, what decides all else about the call) of tensors, options, want_lse, `out` and
# whether the tensors may be of subclasses: where they are and may not, nothing of either. It raises what an argument
# raises that is no tensor.
Reader = Callable[[Tensors, Options, bool, Tensor | None, bool], tuple[list[int], tuple[Any, ...]]]
ALIGNMENT_MASK = 15  # kernels copy rows 16 bytes at a time


def form(t: Tensor) -> tuple[Any, ...]:
    """What decides whether kernels take a tensor, but for its address and its values."""
    return t.shape, t.stride(), t.dtype, t.get_device()


def reader(signature: Signature) -> Reader:
    addresses, parts = [], ["name", "options", "want_lse"]
    for i, arg in enumerate(signature.tensors):
        look = f"t{i}.shape, t{i}.stride(), t{i}.dtype, t{i}.get_device()"
        addresses.append(f"a{i} = " + f"0 if t{i} is None else " * arg.optional + f"t{i}.data_ptr()")
        parts.append(f"None if t{i} is None else ({look})" if arg.optional else look)
        if arg.rows:
            parts.append(f"a{i} & {ALIGNMENT_MASK}")
    parts.append("None if out is None else (out.shape, out.stride(), out.dtype, out.get_device(), "
                 f"a & {ALIGNMENT_MASK})")
    if signature.floats is not None:  # as text, since 0.0 equals -0.0 and kernels tell them apart
        parts.append(f"options[{signature.floats}] and str(options[{signature.floats}])")
    plain = " is ".join([*(f"type(t{i})" for i in range(signature.required)), "Tensor"])
    listed = ", ".join(f"a{i}" for i in range(len(addresses)))
    scope: dict[str, Any] = {"name": signature.name, "Tensor": Tensor}
    exec("\n    ".join([
        "def read(tensors, options, want_lse, out, any_type):",
        "".join(f"t{i}, " for i in range(len(signature.tensors))) + "= tensors",
        f"if not any_type and not ({plain}):",
        "    return [], ()",
        *addresses,
        "a = 0 if out is None else out.data_ptr()",
        f"return [{listed}, a], ({', '.join(parts)})"]), scope)
    made: Reader = scope["read"]
    return made
