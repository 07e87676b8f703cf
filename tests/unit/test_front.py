"""The front door with an operation of this file's: what a new one has to bring, and what it gets for it."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from tiny import tiny_plan
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from flashgen.codegen.plan import Param
from flashgen.codegen.program import Buffer, Program, Step
from flashgen.errors import UnsupportedError
from flashgen.runtime.ops import front, torch_ops
from flashgen.runtime.ops.arguments import number, whole
from flashgen.runtime.ops.front import Arguments, Ready
from flashgen.runtime.ops.signature import Arg, Option, Options, Shape, Signature, Tensors, inverse_root

PLAN = tiny_plan("toy", params=(
    Param("x", "element_ptr", ""), Param("bias", "f32_ptr", ""), Param("result", "f32_out", ""),
    Param("lse", "f32_out", ""), Param("room", "f32_out", ""), Param("times", "i32", "")))


def shapes(tensors: Tensors, options: Options) -> tuple[Shape, ...]:
    return tensors[0].shape, tensors[0].shape[:1]


TOY = Signature("toy", __name__, (Arg("x", rows=True), Arg("shift", "bias", optional=True)),
                (Option("times", "SymInt"), Option("scale", "float", default=inverse_root)), shapes,
                results=("result",))


class Kernel:
    """x * times * scale + bias."""

    plan = PLAN
    launches: ClassVar[list[tuple[set[str], int]]] = []

    def launcher(self, step: Step) -> Callable[..., None]:
        def launch(x: dict[str, Tensor], filled: set[str]) -> None:
            self.launches.append(({name for name, t in x.items() if t is not None}, len(x["room"])))
            made = x["x"] * step.values["times"] * step.values["scale"]
            x["result"].copy_(made if x["bias"] is None else made + x["bias"])
            if x["lse"] is not None:
                x["lse"].fill_(step.values["scale"])
        return launch


class Toy(front.Operation):
    signature = TOY

    def check(self, tensors: Tensors) -> None:
        if tensors[0].dim() != 2:
            raise UnsupportedError(f"x has {tensors[0].dim()} dimensions", where="x", allowed="2")

    def read(self, options: Options) -> Options:
        return whole("times", options[0], 0), float(number("scale", options[1]))

    def prepare(self, call: Arguments) -> Ready:
        x, _ = call.tensors
        if not x.is_contiguous():
            return Ready(copies=(0,))
        if not x.numel():
            return Ready()
        times, scale = call.options
        program = Program((Step("fwd", 1, 32, {"times": times, "scale": scale}),), (Buffer("room", "f32", (3,)),))
        return Ready(program, {"fwd": Kernel()})  # type: ignore[dict-item]


OPERATION = Toy()
OPS, DYNAMIC = torch_ops._op_set(TOY), torch_ops._op_set(TOY, True)
X = torch.arange(32.0).reshape(2, 16)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(torch_ops.OPS, "toy", OPS)
    monkeypatch.setitem(torch_ops.DYNAMIC, "toy", DYNAMIC)
    monkeypatch.setattr(Kernel, "launches", [])


def toy(x: Tensor, times: Any = 3, scale: Any = None, shift: Tensor | None = None, out: Tensor | None = None,
        want_lse: Any = False) -> Any:
    found, lse = front.call(OPERATION, (x, shift), (times, scale), (), out, want_lse)
    return found if lse is None else (found, lse)


def test_calls() -> None:
    assert torch.equal(toy(X), X * 3 / 4)
    out, lse = toy(X, 2, 0.5, shift=torch.ones(16), want_lse=True)
    assert torch.equal(out, X + 1) and torch.equal(lse, torch.full((2,), 0.5))
    given = torch.empty_like(X)
    assert toy(X, out=given) is given and torch.equal(given, X * 3 / 4)
    assert [names for names, _ in Kernel.launches] == [
        {"x", "result", "room"}, {"x", "bias", "result", "lse", "room"}, {"x", "result", "room"}]
    assert {room for _, room in Kernel.launches} == {3}


def test_values_count_whatever_their_type_and_copies_are_made() -> None:
    assert torch.equal(toy(X, torch.tensor(3), want_lse=0), X * 3 / 4)
    assert torch.equal(toy(X.t().contiguous().t()), X * 3 / 4)
    none = toy(X[:0], want_lse=True)
    assert none[0].shape == (0, 16) and none[1].shape == (0,)


@pytest.mark.parametrize("arguments, where", [
    ((X[0],), "x"), (([1.0],), "x"), ((X, 1.5), "times"), ((X, 3, "s"), "scale"), ((X, 3, 1.0, [1.0]), "shift"),
    ((X, 3, 1.0, None, [1.0]), "out"), ((X, 3, 1.0, None, X), "out"), ((X, 3, 1.0, None, None, 7), "return_lse")],
    ids=lambda x: x if isinstance(x, str) else "")
def test_refusals(arguments: tuple[Any, ...], where: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        toy(*arguments)
    assert caught.value.where == where


@pytest.mark.parametrize("more", [{}, {"want_lse": True}, {"out": True}, {"out": True, "want_lse": True}], ids=str)
def test_one_graph_for_all_numbers(more: dict[str, bool]) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def call(x: Tensor, times: int, scale: float) -> Any:
        out = {"out": torch.empty_like(x)} if "out" in more else {}
        return toy(x, times, scale, want_lse="want_lse" in more, **out)

    compiled = torch.compile(call, backend=counter, fullgraph=True)
    for times, scale in ((3, 0.5), (4, 0.25), (5, 0.75)):
        for found, expected in zip(compiled(X, times, scale), call(X, times, scale), strict=True):
            assert torch.equal(found, expected)
    assert counter.frame_count == 2


def test_ops_are_what_the_lists_say() -> None:
    assert str(OPS.out_lse._schema) == (
        "flashgen::toy_out_lse(Tensor x, Tensor? shift, SymInt times, float scale, *, Tensor(a!) out) -> Tensor")
    assert str(DYNAMIC.plain._schema) == (
        "flashgen::toy_dynamic(Tensor x, Tensor? shift, SymInt times, Tensor numbers) -> Tensor")
    torch.library.opcheck(OPS.lse, (X, None, 3, 0.5))
    torch.library.opcheck(DYNAMIC.out, (X, torch.ones(16), 3, torch_ops.as_numbers(0.5)), {"out": torch.empty_like(X)})


def test_keys_tell_apart_what_kernels_tell_apart() -> None:
    def key(x: Tensor, **more: Any) -> Any:
        given = {"shift": None, "times": 3, "scale": 0.5, "lse": False, "out": None, **more}
        return OPERATION.read_key((x, given["shift"]), (given["times"], given["scale"]), given["lse"], given["out"],
                                  False)[1]

    odd = torch.zeros(33)[1:].reshape(2, 16)
    assert key(X) == key(X.clone())
    others = [key(odd), key(X.double()), key(X[:1]), key(X.t()), key(X, shift=X), key(X, times=4), key(X, lse=True),
              key(X, out=X), key(X, out=odd)]
    assert len({key(X), *others}) == len(others) + 1
    assert key(torch.nn.Parameter(X)) == ()
