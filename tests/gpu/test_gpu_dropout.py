"""Dropout on the device: against fp64 with the mask that flashgen.dropout_mask shows; graphs, and torch.compile."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import flashgen
from flashgen.codegen.families.shared.launch import kept_of_65536

pytestmark = pytest.mark.gpu
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 5e-4}  # relative to the norm, of results and gradients


def leaves(batch: int, rows: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype, device: str
           ) -> tuple[Tensor, ...]:
    made = torch.Generator(device).manual_seed(0)
    return tuple(torch.randn(batch, rows, count, head_dim, device=device, generator=made).to(dtype).requires_grad_()
                 for count in (heads[0], heads[1], heads[1]))


def truth(q: Tensor, k: Tensor, v: Tensor, weights: Tensor, causal: bool) -> Tensor:
    group = q.shape[2] // k.shape[2]
    queries, keys, values = (t.double().transpose(1, 2) for t in (q, k, v))
    scores = queries @ keys.repeat_interleave(group, 1).mT * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -torch.inf)
    return (torch.softmax(scores, -1) * weights @ values.repeat_interleave(group, 1)).transpose(1, 2)


def close(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...], bound: float) -> bool:
    return all(float((a.double() - b.double()).norm() / b.double().norm()) < bound
               for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("causal, dtype, p", [(False, torch.bfloat16, 0.1), (True, torch.float16, 0.5)])
def test_results_and_gradients(head_dim: int, causal: bool, dtype: torch.dtype, p: float, device: str) -> None:
    q, k, v = leaves(2, 333, (4, 2), head_dim, dtype, device)
    seed = torch.tensor([-5, 3], device=device)
    out = flashgen.attention(q, k, v, causal=causal, dropout_p=p, dropout_seed=seed)
    kept = flashgen.dropout_mask(seed, p, num_heads=4, seqlen_q=333, seqlen_kv=333, batch=2)
    right = truth(q, k, v, kept * (65536 / kept_of_65536(p)), causal)
    dout = torch.randn_like(out)
    found = out, *torch.autograd.grad(out, (q, k, v), dout)
    assert close(found, (right, *torch.autograd.grad(right, (q, k, v), dout.double())), TOLERANCE[dtype])


def test_replays_of_a_graph_draw_anew(device: str) -> None:
    q, k, v = (t.detach() for t in leaves(1, 256, (2, 2), 64, torch.bfloat16, device))

    def call() -> Tensor:
        return flashgen.attention(q, k, v, dropout_p=0.5)  # type: ignore[return-value]

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    found = []
    for _ in range(3):
        graph.replay()
        found.append(out.clone())
    assert not torch.equal(found[0], found[1]) and not torch.equal(found[1], found[2])
    torch.manual_seed(4)
    graph.replay()
    first = out.clone()
    torch.manual_seed(4)
    graph.replay()
    assert torch.equal(out, first)


@pytest.mark.time_limit(300)
def test_compiled_calls_and_checkpoints_draw_once(device: str) -> None:
    """The gradients are those of the result: of the same seed."""
    q, k, v = leaves(1, 200, (2, 2), 64, torch.float16, device)

    def loss(*inputs: Tensor) -> Tensor:
        return flashgen.attention(*inputs, dropout_p=0.5).float().square().sum()  # type: ignore[union-attr]

    def agrees(function: Any) -> bool:
        """Euler: the loss has degree 2 in v, so that its gradient there, times v, is twice the loss."""
        value = function(q, k, v)
        (dv,) = torch.autograd.grad(value, (v,))
        return bool(((dv * v).double().sum() / (2 * value.double()) - 1).abs() < 1e-2)

    assert agrees(loss) and agrees(torch.compile(loss, fullgraph=True))
    assert agrees(lambda *inputs: checkpoint(loss, *inputs, use_reentrant=False))
