"""What an operation takes and gives: one list of tensors and one of options. Its torch ops, their fakes, the checks of
types, the key of the memo and the order of addresses all follow from these lists.

This module and the signatures beside it import nothing, because `import flashgen` registers the ops (torch_ops.py).
"""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

Tensors = tuple[Any, ...]  # of a call, in the order of a signature; None where one is left out
Options = tuple[Any, ...]
Shape = tuple[int, ...]


class Arg(NamedTuple):
    """A tensor that an operation reads."""

    name: str
    pointer: str = ""       # its name among the pointers of plans, where that differs
    optional: bool = False
    rows: bool = False      # kernels copy its rows, 16 bytes at a time: alignment counts, and `out` must not overlap it
    device_made: bool = False  # a kernel made it for one device: of no use on another

    @property
    def schema(self) -> str:
        return f"Tensor{'?' * self.optional} {self.name}"


class Option(NamedTuple):
    """A plain value. `default`: for a value of None, what the call's tensors decide."""

    name: str
    type: str               # as torch's schemas have it
    literal: str = ""       # the schema's default
    default: Callable[[Tensors], Any] | None = None

    @property
    def schema(self) -> str:
        return f"{self.type} {self.name}" + (f"={self.literal}" if self.literal else "")


class Signature:
    """The lists, and what follows from them."""

    def __init__(self, name: str, home: str, tensors: tuple[Arg, ...], options: tuple[Option, ...],
                 shapes: Callable[[Tensors, Options], tuple[Shape, ...]], *, extra: str = "",
                 results: tuple[str, ...] = ("out",), has_lse: bool = True, gradient: str = "") -> None:
        """`home`: the module whose OPERATION does the work. `results`: what a call gives, by the names of the pointers
        of plans. `shapes` gives their shapes, and behind them that of lse. `extra`: the name of a list of more tensors.
        Without lse there is no `out` to write to, either; several results come without both. `gradient`: the module
        whose `with_gradient` makes calls that autograd follows.
        """
        assert len(results) == 1 or not has_lse, name
        self.name, self.home, self.tensors, self.options, self.shapes = name, home, tensors, options, shapes
        self.extra, self.results, self.has_lse, self.gradient = extra, results, has_lse, gradient
        self.required = sum(not arg.optional for arg in tensors)  # tensors that every call has: they come first
        self.pointers = tuple(arg.pointer or arg.name for arg in tensors)
        types = [option.type for option in options]
        # The float option that may travel in a tensor of numbers, and the list of floats that then goes with it.
        self.number = types.index("float") if "float" in types else None
        self.floats = types.index("float[]") if "float[]" in types else None

    def schema(self, dynamic: bool = False) -> str:
        """The arguments of its torch ops. `dynamic`: with a tensor of numbers in the place of the float option."""
        options = [option.schema for option in self.options]
        if dynamic and self.number is not None:
            options[self.number] = "Tensor numbers"
        tail = [f"Tensor[]? {self.extra}=None"] if self.extra else []
        return ", ".join([*(arg.schema for arg in self.tensors), *options, *tail])

    def split(self, arguments: tuple[Any, ...]) -> tuple[Tensors, Options, tuple[Tensor, ...]]:
        """Tensors, options and the extra tensors of a torch op's arguments, defaults left out by torch filled in."""
        count = len(self.tensors)
        options = arguments[count:count + len(self.options)]
        options = tuple(tuple(x) if isinstance(x, list) else x for x in options)
        options += tuple(() for _ in self.options[len(options):])
        extra = arguments[count + len(self.options)] if len(arguments) > count + len(self.options) else None
        return arguments[:count], options, tuple(extra or ())


def inverse_root(tensors: Tensors) -> float:
    """The usual softmax_scale: head_dim_qk ** -0.5. Any number will do for queries that no check has seen."""
    q = tensors[0]
    return (q.shape[-1] or 1) ** -0.5 if q.dim() else 1.0
