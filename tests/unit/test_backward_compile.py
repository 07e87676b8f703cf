"""Gradients of attention under torch.compile and as torch ops, with backward kernels played by the reference."""
from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from backward_kit import FakeKernel, fake_kernels
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import flashgen
from flashgen.errors import UnsupportedError
from flashgen.runtime.ops import torch_ops
from flashgen.runtime.ops.attention_backward.problem import BackwardProblem
from flashgen.runtime.ops.attention_backward.signature import ATTENTION_BACKWARD

TENSORS = ("Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse, Tensor? cu_seqlens_q, "
           "Tensor? cu_seqlens_kv")
TAIL = "str spec, bool deterministic, SymInt[] ints=[], float[] floats=[], Tensor[]? tensors=None"
RESULTS = "(Tensor, Tensor, Tensor)"
VARLEN = BackwardProblem(3, (5, 0, 9), (3, 4, 2), 2, 1, causal=True, tail=2, lse_gradient=True)


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeKernel]:
    return fake_kernels(monkeypatch)


def leaves(seqlen: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, n, heads, 64, generator=made).bfloat16().requires_grad_()
               for n, heads in ((seqlen, 2), (seqlen + 3, 1), (seqlen + 3, 1)))
    return q, k, v


def gradients(function: Callable[..., Any], inputs: tuple[Tensor, ...], *numbers: float) -> tuple[Tensor, ...]:
    found = function(*inputs, *numbers)
    loss = sum((part * torch.linspace(-1, 1, part.numel()).reshape(part.shape)).sum()
               for part in (found if isinstance(found, tuple) else (found,)))
    return torch.autograd.grad(loss, inputs)


def graphs_of(function: Callable[..., Any], calls: Sequence[tuple[Any, ...]], backend: str = "aot_eager") -> int:
    """How many graphs fullgraph=True makes for the calls, whose gradients must be those of eager calls."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(function, backend=counter, fullgraph=True)
    found = [gradients(compiled, inputs, *numbers) for inputs, *numbers in calls]
    for (inputs, *numbers), result in zip(calls, found, strict=True):
        assert all(map(torch.equal, result, gradients(function, inputs, *numbers)))
    return counter.frame_count


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_graph_for_all_lengths(backend: str) -> None:
    calls = [(leaves(n),) for n in (8, 12, 15, 21)]
    assert graphs_of(lambda q, k, v: flashgen.attention(q, k, v, causal=True), calls, backend) == 2
    assert graphs_of(lambda *t: flashgen.attention(*t, return_lse=True, window=(3, 1)), calls[:1], backend) == 1


@pytest.mark.parametrize("name, function, numbers", [
    ("scale", lambda q, k, v, x: flashgen.attention(q, k, v, softmax_scale=x), (0.25, 0.5, 0.75)),
    ("lse", lambda q, k, v, x: flashgen.attention(q, k, v, softmax_scale=x, return_lse=True), (0.25, 0.5, 0.75)),
    ("window", lambda q, k, v, x: flashgen.attention(q, k, v, window=(x, 0)), (2, 3, 5))])
def test_one_graph_for_all_numbers(name: str, function: Callable[..., Tensor], numbers: Sequence[float]) -> None:
    assert graphs_of(function, [(leaves(8), number) for number in numbers]) == 2


def test_varlen_and_checkpoint() -> None:
    x = VARLEN.make_inputs()
    more = {name: value for name, value in x.keywords.items() if name != "dlse"}
    inputs = tuple(t.clone().nan_to_num(0.0).requires_grad_() for t in (x.q, x.k, x.v))
    assert graphs_of(lambda q, k, v: flashgen.attention(q, k, v, **more, return_lse=True)[0], [(inputs,)]) == 1
    assert graphs_of(lambda q, k, v: checkpoint(
        lambda *t: flashgen.attention(*t) * 2.0, q, k, v, use_reentrant=False), [(leaves(9),)]) == 1


@pytest.mark.filterwarnings("ignore:Error detected in _RefusedBackward")
def test_the_explicit_form() -> None:
    x = VARLEN.make_inputs()
    torch._dynamo.reset()
    keywords = x.keywords
    compiled = torch.compile(lambda *t: flashgen.attention_backward(*t, **keywords), backend="aot_eager",
                             fullgraph=True)
    right = flashgen.attention_backward(*x.tensors, **keywords)
    assert all(map(torch.equal, compiled(*x.tensors), right))
    leaves = tuple(t.clone().requires_grad_() for t in x.tensors)
    with torch.no_grad():
        assert all(map(torch.equal, compiled(*leaves), right))
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="a gradient of attention's gradients"):
        compiled(*leaves)


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(32, 384).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 64)).unbind(-3)
        return flashgen.attention(q, k, v, causal=True)


def test_a_module_with_parameters() -> None:
    """Eager, compiled, exported, with a choice of what a checkpoint keeps, and with kept tensors on the host."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    layer, x = Layer(), torch.randn(2, 7, 32).bfloat16()
    exported = torch.export.export(layer, (x,), dynamic_shapes={"x": {1: torch.export.Dim("s", min=2, max=100)}})
    keep = functools.partial(create_selective_checkpoint_contexts, [torch.ops.flashgen.attention_lse.default])

    def offloaded(x: Tensor) -> Any:
        with torch.autograd.graph.save_on_cpu():
            return layer(x)

    calls = {"compiled": torch.compile(layer, backend="aot_eager", fullgraph=True), "offloaded": offloaded,
             "checkpointed": lambda x: checkpoint(layer, x, use_reentrant=False, context_fn=keep)}
    right = weight_gradient(layer, layer, x)
    for name, call in calls.items():
        assert torch.equal(weight_gradient(layer, call, x), right), name
    module = exported.module()
    assert torch.equal(weight_gradient(module, module, x), right)


def weight_gradient(module: torch.nn.Module, call: Callable[..., Tensor], x: Tensor) -> Tensor:
    module.zero_grad()
    call(x).float().square().sum().backward()
    found: Tensor = module.qkv.weight.grad.clone()
    return found


def test_nothing_holds_a_call_that_is_gone() -> None:
    inputs = leaves(8)
    gc.disable()
    try:
        out = flashgen.attention(*inputs)
        node = weakref.ref(out.grad_fn)
        del out
        assert node() is None
    finally:
        gc.enable()


def test_refusals_of_graphs() -> None:
    torch._dynamo.reset()
    q, k, v = leaves(8)
    for more in ({"out": torch.empty_like(q.detach())}, {"deterministic": True},
                 {"spec": "sigmoid", "params": {"bias": 0.0}}):
        with pytest.raises(UnsupportedError, match=r"gradient|torch's switch"):
            torch.compile(lambda more=more: flashgen.attention(q, k, v, **more), backend="aot_eager")()
    with torch.no_grad():
        out = torch.compile(lambda: flashgen.attention(q, k, v, deterministic=True), backend="aot_eager")()
    assert out.grad_fn is None


def test_graphs_without_a_gradient_have_the_ops_that_they_had() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    q, k, v = (t.detach() for t in leaves(8))
    torch.compile(lambda: flashgen.attention(q, k, v), backend=counter, fullgraph=True)()
    assert torch_ops.OPS["attention"].plain in [node.target for node in counter.graphs[0].graph.nodes]


# ---- the ops themselves

def test_schemas() -> None:
    ops, dynamic = (made["attention_backward"] for made in (torch_ops.OPS, torch_ops.DYNAMIC))
    head = f"({TENSORS}, int causal, SymInt window_left, SymInt window_right, "
    assert str(ops.plain._schema) == f"flashgen::attention_backward{head}float softmax_scale, {TAIL}) -> {RESULTS}"
    assert str(dynamic.plain._schema) == (
        f"flashgen::attention_backward_dynamic{head}Tensor numbers, {TAIL}) -> {RESULTS}")
    assert ops[1:] == (None, None, None)
    assert str(torch_ops.OPS["attention"].lse._schema) == (
        "flashgen::attention_lse(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_kv, "
        "int causal, SymInt window_left, SymInt window_right, float softmax_scale, str spec, SymInt[] ints=[], "
        "float[] floats=[], Tensor[]? tensors=None) -> (Tensor, Tensor)")


def test_fakes() -> None:
    x = VARLEN.make_inputs()
    with FakeTensorMode() as mode:
        tensors = [mode.from_tensor(t) for t in x.tensors]
        found = torch_ops.OPS["attention_backward"].plain(*tensors, None, None, None, 0, -1, -1, 0.5, "", False)
    assert [(t.shape, t.dtype) for t in found] == [(t.shape, t.dtype) for t in (x.q, x.k, x.v)]
    assert all(t.is_contiguous() for t in found) and not FakeKernel.launches


@pytest.mark.parametrize("dynamic", [False, True])
def test_opcheck(dynamic: bool) -> None:
    x = BackwardProblem(1, 9, 12, 2, 1, lse_gradient=True).make_inputs()
    ops = torch_ops.DYNAMIC if dynamic else torch_ops.OPS
    scale = torch_ops.as_numbers(0.3) if dynamic else 0.3
    plain = tuple(t.detach() for t in x.tensors)
    torch.library.opcheck(ops["attention_backward"].plain, (
        *plain, x.dlse, None, None, 0, 3, -1, scale, "", False))
    inputs = tuple(t.clone().requires_grad_() for t in (x.q, x.k, x.v))
    for op in (ops["attention"].plain, ops["attention"].lse):
        torch.library.opcheck(op, (*inputs, None, None, 1, -1, -1, scale, ""))


def test_the_signature_is_the_schema() -> None:
    assert ATTENTION_BACKWARD.results == ("dq", "dk", "dv") and not ATTENTION_BACKWARD.has_lse
    assert ATTENTION_BACKWARD.required == 6


def test_a_spec_in_a_graph() -> None:
    """Its numbers stay open, and a sink has its gradient; other tensors of parameters have none there."""
    torch._dynamo.reset()
    made = flashgen.variant("cap * score", "q_pos - kv_pos < reach", sink="per_head", params={
        "cap": {"type": "float"}, "reach": {"type": "int"}})
    q, k, v = leaves(8)
    inputs = q, k, v, torch.randn(q.shape[2], requires_grad=True)

    def loss(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, cap: float, reach: int) -> Tensor:
        params = {"cap": cap, "reach": reach, "sink": sink}
        return flashgen.attention(q, k, v, spec=made, params=params).float().square().sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for numbers in ((2.0, 3), (0.5, 4), (0.25, 5)):
        one, other = (torch.autograd.grad(each(*inputs, *numbers), inputs) for each in (compiled, loss))
        assert all(map(torch.equal, one, other))
        values = [launch["values"] for launch in FakeKernel.launches[-2:]]
        assert values == 2 * [{"user_cap": numbers[0], "user_reach": numbers[1]}]
    biased = flashgen.variant("score + bias[0]", params={
        "bias": {"type": "tensor", "dtype": "float32", "shape": [1]}})
    bias = torch.zeros(1, requires_grad=True)
    with pytest.raises(UnsupportedError, match="a gradient of bias is asked for in a call that is traced"):
        torch.compile(lambda: flashgen.attention(q, k, v, spec=biased, params={"bias": bias}), backend="aot_eager")()
