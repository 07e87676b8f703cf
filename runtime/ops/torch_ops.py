"""The torch ops of flashgen, made from the signatures of its operations: schemas, fakes, and the way to what runs them.

`import flashgen` registers them, so that exported programs, AOTInductor packages and pickled graphs find them by name.
So this module imports torch alone; what runs an op is imported when the op first runs.

They are defined through torch.library.Library, whose dispatch costs a tenth of custom_op's. Each op keeps one fixed
signature, because optional outputs would need a fake implementation that depends on values.

Windows and int parameters are SymInts: a compiled graph serves every value. No schema type does that for floats, which
torch.compile makes constants of the graph wherever an op takes them. Floats that change from call to call therefore
travel in `numbers`, a float64 tensor on the CPU (the scale, then float parameters), through ops of their own, whose
names end in `_dynamic`. A CUDA graph would freeze those numbers, so these ops carry the tag that keeps them out of one.
"""
from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashgen.runtime.ops.registry import SIGNATURES
from flashgen.runtime.ops.signature import Signature

Results = tuple[Any, ...]  # the results of a signature, and behind them lse or None
_library = torch.library.Library("flashgen", "DEF")  # kept alive: its ops go with it
_DEVICES = (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)
_NUMBERS_TAGS = tuple(getattr(torch.Tag, name) for name in ("cudagraph_unsafe",) if hasattr(torch.Tag, name))


class OpSet(NamedTuple):
    """The four ops of one operation: with and without lse, each with and without `out`; of one without lse, the first.
    """

    plain: Any
    lse: Any = None
    out: Any = None
    out_lse: Any = None

    def call(self, arguments: tuple[Any, ...], out: Tensor | None, want_lse: bool) -> Results:
        """`out` None: the op allocates it."""
        if out is None:
            if want_lse:
                found: Results = self.lse(*arguments)
                return found
            made = self.plain(*arguments)
            return (*made, None) if isinstance(made, (tuple, list)) else (made, None)
        if want_lse:
            return out, self.out_lse(*arguments, out=out)
        self.out(*arguments, out=out)
        return out, None


def _define(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any], tags: tuple[Any, ...]) -> Any:
    """flashgen::<name>, which runs `run` on both kinds of device."""
    _library.define(name + schema, tags=tags)
    _library.impl(name, run, "CUDA")
    _library.impl(name, run, "CPU")
    torch.library.register_fake(f"flashgen::{name}", fake, lib=_library)
    return getattr(torch.ops.flashgen, name).default


def _follow(signature: Signature, op: Any, work: Callable[..., Any], whole: Any = None) -> None:
    """Let autograd follow an op, which runs `work`. `whole`: the op that gives lse besides, which a gradient needs;
    autograd then follows that one in its place."""
    def below(keyset: Any, x: tuple[Any, ...]) -> Any:
        left = keyset & torch._C._after_autograd_keyset
        if left.highestPriorityTypeId() in _DEVICES:  # nobody else listens: half of a second dispatch is saved
            return work(*x)
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(left, *x)

    def run(keyset: Any, *x: Any) -> Any:
        if not (torch.is_grad_enabled() and torch._C._any_requires_grad(*x)):
            return below(keyset, x)
        if whole is not None:
            return whole(*x)[0]
        gradient = importlib.import_module(signature.gradient)
        return gradient.followed(signature, x, lambda: below(keyset, x))

    _library.impl(op._schema.name.partition("::")[2], run, "Autograd", with_keyset=True)


def _op_set(signature: Signature, dynamic: bool = False) -> OpSet:
    """<name>, <name>_lse, <name>_out and <name>_out_lse, or those with a tensor of numbers, which end in _dynamic."""
    name, end, arguments = signature.name, "_dynamic" * dynamic, signature.schema(dynamic)
    tags = _NUMBERS_TAGS if dynamic else ()

    def run(x: tuple[Any, ...], out: Tensor | None, want_lse: bool) -> Results:
        front = importlib.import_module("flashgen.runtime.ops.front")
        found: Results = front.run_op(signature, x, out, want_lse)
        return found

    def shapes(x: tuple[Any, ...]) -> Any:
        tensors, options, _ = signature.split(x)
        return signature.shapes(tensors, options)

    def fake_out(x: tuple[Any, ...]) -> Any:
        made = tuple(x[0].new_empty(shape) for shape in shapes(x)[:len(signature.results)])
        return made if len(made) > 1 else made[0]

    def fake_lse(x: tuple[Any, ...]) -> Tensor:
        made: Tensor = x[0].new_empty(shapes(x)[-1], dtype=torch.float32)
        return made

    several = len(signature.results) > 1
    returned = "({})".format(", ".join(["Tensor"] * len(signature.results))) if several else "Tensor"

    def work(*x: Any) -> Any:
        made = run(x, None, False)
        return made[:-1] if several else made[0]

    def work_lse(*x: Any) -> Any:
        return run(x, None, True)

    plain = _define(name + end, f"({arguments}) -> {returned}", work, lambda *x: fake_out(x), tags)
    if not signature.has_lse:
        if signature.gradient:
            _follow(signature, plain, work)
        return OpSet(plain)
    with_lse = _define(f"{name}_lse{end}", f"({arguments}) -> (Tensor, Tensor)", work_lse,
                       lambda *x: (fake_out(x), fake_lse(x)), tags)
    if signature.gradient:
        _follow(signature, with_lse, work_lse)
        _follow(signature, plain, work, with_lse)
    return OpSet(
        plain, with_lse,
        _define(f"{name}_out{end}", f"({arguments}, *, Tensor(a!) out) -> ()",
                lambda *x, out: (run(x, out, False), None)[1], lambda *_, out: None, tags),
        _define(f"{name}_out_lse{end}", f"({arguments}, *, Tensor(a!) out) -> Tensor",
                lambda *x, out: run(x, out, True)[1], lambda *x, out: fake_lse(x), tags))


OPS = {signature.name: _op_set(signature) for signature in SIGNATURES}
DYNAMIC = {signature.name: _op_set(signature, True) for signature in SIGNATURES if signature.number is not None}


def all_static(*values: float) -> bool:
    """Whether a graph that torch.compile traces may hold the numbers as constants. Only for code that it traces."""
    shapes = torch.fx.experimental.symbolic_shapes
    if not hasattr(shapes, "has_static_value"):
        return True  # an older torch, which then makes a graph for each value
    return all([shapes.has_static_value(value) for value in values])


def as_numbers(*values: float) -> Tensor:
    """A float64 tensor on the CPU. Products of a tensor and a float are what torch.compile can keep dynamic."""
    one = torch.ones((), dtype=torch.float64, device="cpu")
    return torch.stack([one * value for value in values])
