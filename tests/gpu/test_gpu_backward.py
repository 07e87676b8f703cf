"""Gradients on the device: every shipped variant, autograd end to end, streams, CUDA graphs, torch.compile."""
from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from kit import runs_here
from torch import Tensor

import flashgen
from flashgen.codegen.spec.spec import Spec, load_specs, shipped_spec_paths, spec_path
from flashgen.runtime.ops.attention_backward import op
from flashgen.runtime.ops.attention_backward.problem import BackwardInputs, BackwardProblem, by_name
from flashgen.runtime.ops.registry import op_of
from flashgen.runtime.verify.compare import check, check_bits
from flashgen.runtime.verify.expression_mods import ExpressionMods
from flashgen.runtime.verify.reference import reference
from flashgen.runtime.verify.verify import verify_spec

pytestmark = pytest.mark.gpu
# Each with the kernels beside it.
SHIPPED = [(path, spec) for path in shipped_spec_paths() for spec in load_specs(path).specs
           if runs_here(spec) and op_of(spec) is op and spec.kernel == op.main_kernel(spec)]
PROBLEMS = (
    BackwardProblem(2, 200, 333, 6, 2, causal=True, lse_gradient=True),
    BackwardProblem(2, 333, 200, 6, 2, 128, 128, causal=True),                         # rows without keys
    BackwardProblem(1, 130, 257, 4, 1, 192, 128, dtype="fp16", lse_gradient=True),
    BackwardProblem(1, 257, 130, 2, 2, 256, 256, causal="top_left"),
    BackwardProblem(2, 300, 300, 2, 1, 72, 72, window=(17, 64)),
    BackwardProblem(4, (130, 0, 9, 64), (200, 40, 0, 64), 6, 2, 128, 128, causal=True, tail=7, lse_gradient=True),
    BackwardProblem(3, (76, 34, 146), (1, 1, 1), 2, 2, 32, 32, causal=True, dtype="fp16"))  # B065
EACH = pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.label)
SMALL = PROBLEMS[0]
SLEEP_CYCLES = 200_000_000  # about 0.1 s: whatever does not wait for it reads the old contents


@pytest.mark.parametrize("path, spec", SHIPPED, ids=[f"{s.variant}.{s.arch}" for _, s in SHIPPED])
@pytest.mark.time_limit(300)
def test_verify(path: str, spec: Spec, cuda: str) -> None:
    failures = [row for row in verify_spec([spec], path=str(path)) if not row.ok]
    assert not failures, "\n\n".join(row.message for row in failures[:3])


@EACH
def test_explicit_gradients(problem: BackwardProblem, device: str) -> None:
    x = problem.make_inputs(device)
    check(by_name(flashgen.attention_backward(*x.tensors, **x.keywords)), x)


def leaves(x: BackwardInputs) -> tuple[Tensor, ...]:
    return tuple(t.detach().clone().requires_grad_() for t in (x.q, x.k, x.v))


def backward(x: BackwardInputs, inputs: tuple[Tensor, ...], call: Any = flashgen.attention) -> tuple[Tensor, ...]:
    options = {name: value for name, value in x.keywords.items() if name != "dlse"}
    out, lse = call(*inputs, **options, return_lse=True)
    outputs = (out, lse) if x.dlse is not None else (out,)
    return torch.autograd.grad(outputs, inputs, (x.dout, x.dlse)[:len(outputs)])


def same_but_for_order(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], what: str) -> None:
    """dq is a sum whose parts come in any order; dk and dv are not."""
    torch.testing.assert_close(found[0], expected[0], rtol=2e-2, atol=1e-3)
    for one, right in zip(found[1:], expected[1:], strict=True):
        check_bits(one, right, what)


@EACH
def test_autograd(problem: BackwardProblem, cuda: str) -> None:
    x = problem.make_inputs(cuda)
    torch.full((1 << 26,), float("nan"), device=cuda)  # what the allocator hands out again
    check(by_name(backward(x, leaves(x))), x)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", ["alibi", "block_sparse", "chunked", "document", "prefix_lm", "sliding_window",
                                  "softcap", "t5_bias", "tree_mask", "window_sinks"])
def test_shipped_variants(name: str, head_dim: int, cuda: str) -> None:
    """Their files name forward kernels alone."""
    spec = next(one for one in load_specs(spec_path(name)).specs if one.head_dim_qk == head_dim and not one.causal)
    x = BackwardProblem(2, 700, 1000, 4, 2, head_dim, head_dim, lse_gradient=True).make_inputs(cuda).with_mods(spec)
    check(by_name(backward(x, leaves(x), functools.partial(flashgen.attention, spec=name))), x)


def test_gradients_of_parameters(cuda: str) -> None:
    """Against autograd of the reference: a table that each score reads in one place, and a sink."""
    made = flashgen.variant("score + bias[head_q, min(q_pos - kv_pos, 99)]", "kv_pos <= q_pos", sink="per_head",
                            params={"bias": {"type": "tensor", "dtype": "float32", "shape": ["num_heads_q", 100]}})
    x = BackwardProblem(2, 300, 300, 4, 2, 64, 64).make_inputs(cuda)
    params = {"bias": torch.randn(4, 100, device=cuda), "sink": torch.randn(4, device=cuda)}
    exact = {name: t.double().requires_grad_() for name, t in params.items()}
    mods = ExpressionMods.of(made.spec(family="fa2", pass_="fwd", arch="sm_80", dtype="bf16", head_dim_qk=64), exact)
    out, _ = reference(x.q, x.k, x.v, mods=mods)
    wanted = torch.autograd.grad(out, [*exact.values()], x.dout.double())
    given = {name: t.clone().requires_grad_() for name, t in params.items()}
    found = torch.autograd.grad(flashgen.attention(x.q, x.k, x.v, spec=made, params=given), [*given.values()], x.dout)
    for one, right in zip(found, wanted, strict=True):
        assert (one.double() - right).norm() < 2e-2 * right.norm()


def test_b036_any_dout(cuda: str) -> None:
    x = SMALL.make_inputs(cuda)
    inputs = leaves(x)
    plain = torch.autograd.grad(flashgen.attention(*inputs), inputs, torch.ones_like(x.out))
    same_but_for_order(torch.autograd.grad(flashgen.attention(*inputs).sum(), inputs), plain, "a sum")
    by_head = x.dout.transpose(1, 2).contiguous().transpose(1, 2)
    same_but_for_order(torch.autograd.grad(flashgen.attention(*inputs), inputs, by_head),
                       torch.autograd.grad(flashgen.attention(*inputs), inputs, x.dout), "head-major")


def test_expanded_keys(cuda: str) -> None:
    """No tensor map describes them."""
    x = SMALL.make_inputs(cuda)
    q, k, v = leaves(x)
    one = k[:, :, :1].detach().requires_grad_()
    found = torch.autograd.grad(flashgen.attention(q, one.expand_as(k), v), (q, one, v), x.dout)
    dense = one.detach().expand_as(k).contiguous().requires_grad_()
    expected = torch.autograd.grad(flashgen.attention(q, dense, v), (q, dense, v), x.dout)
    torch.testing.assert_close(found[1], expected[1].sum(2, keepdim=True), rtol=2e-2, atol=2e-2)


def test_the_current_stream_orders_both_ways(cuda: str) -> None:
    x = SMALL.make_inputs(cuda)
    expected, inputs, stream = backward(x, leaves(x)), leaves(x), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for _ in range(3):
        with torch.no_grad():
            late = tuple(torch.zeros_like(t) for t in inputs)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP_CYCLES)
            for t, right in zip(late, inputs, strict=True):
                t.copy_(right.detach())
            found = backward(x, tuple(t.requires_grad_() for t in late))
        stream.synchronize()
        same_but_for_order(found, expected, "on another stream")


def test_a_graph_of_both_ways(cuda: str) -> None:
    x = SMALL.make_inputs(cuda)
    inputs, stream = leaves(x), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            backward(x, inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = backward(x, inputs)
    for _ in range(2):
        with torch.no_grad():
            inputs[1].neg_()
        graph.replay()
        same_but_for_order(found, backward(x, leaves(x.with_(k=inputs[1].detach()))), "replayed")


@pytest.mark.parametrize("problem", [PROBLEMS[0], PROBLEMS[5]], ids=["dense", "varlen"])
def test_compiled(problem: BackwardProblem, cuda: str) -> None:
    torch._dynamo.reset()
    x = problem.make_inputs(cuda)
    compiled = torch.compile(flashgen.attention, fullgraph=True)
    same_but_for_order(backward(x, leaves(x), compiled), backward(x, leaves(x)), "compiled")


def test_b029_more_than_2_to_the_31_elements(cuda: str) -> None:
    """dq_accum of 8300 sequences of one row: the last ones have the gradients that they have alone."""
    if torch.cuda.mem_get_info()[0] < 30 << 30:
        pytest.skip("needs 30 GiB of free device memory")
    q, dout = (torch.randn(8300, 1, 16, 128, device=cuda, dtype=torch.bfloat16) for _ in range(2))
    out, lse = flashgen.attention(q, q, q, return_lse=True)
    together = flashgen.attention_backward(dout, q, q, q, out, lse)
    last = [t[-3:] for t in (dout, q, q, q, out, lse)]
    for name, found, right in zip(("dq", "dk", "dv"), together, flashgen.attention_backward(*last), strict=True):
        check_bits(found[-3:], right, f"{name} of the last three")
