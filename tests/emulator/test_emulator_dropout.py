"""Dropout on the emulator, forward and backward: against fp64 with the mask that flashgen.dropout_mask shows."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from emulated_backward import Call, backward_spec, in_all_orders
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import flashgen
from flashgen.codegen.families.registry import lower
from flashgen.codegen.families.shared.launch import kept_of_65536
from flashgen.codegen.spec.spec import Spec, Tile
from flashgen.errors import UnsupportedError
from flashgen.runtime.emulator.schedule import Schedule, scheduled
from flashgen.runtime.ops.registry import op_of
from flashgen.runtime.verify.verify import verify_spec

TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 5e-4}  # relative to the norm, of results and gradients


def draw(rows: tuple[int, ...], heads: int, dtype: torch.dtype, seed: int) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(*rows, heads, 64, generator=made).to(dtype).requires_grad_()


def truth(q: Tensor, k: Tensor, v: Tensor, weights: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """out and lse of sequences [batch, seqlen, heads, columns] in fp64; `weights`: what becomes of 1."""
    group = q.shape[2] // k.shape[2]
    queries, keys, values = (t.double().transpose(1, 2) for t in (q, k, v))
    scores = queries @ keys.repeat_interleave(group, 1).mT * q.shape[-1] ** -0.5
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(scores.shape[-1] - scores.shape[-2])
        scores = scores.masked_fill(~seen, -torch.inf)
    p = torch.softmax(scores, -1) * weights
    return (p @ values.repeat_interleave(group, 1)).transpose(1, 2), scores.logsumexp(-1)


def check(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...], dtype: torch.dtype, of_sums: int = 0) -> None:
    """`of_sums`: how many of the last are sums over all rows, in which rounding of `out`, hence of delta, adds up."""
    for place, (here, right) in enumerate(zip(found, wanted, strict=True), of_sums - len(found)):
        assert (here.double() - right).norm() < TOLERANCE[dtype] * right.norm() * (40 if place >= 0 else 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal, p", [(False, 0.5), (True, 0.1)])
def test_dense(dtype: torch.dtype, causal: bool, p: float) -> None:
    """Two sequences, two query heads for a key head, lengths that no tile divides."""
    q, k, v = draw((2, 70), 4, dtype, 0), draw((2, 101), 2, dtype, 1), draw((2, 101), 2, dtype, 2)
    torch.manual_seed(5)
    out, lse = flashgen.attention(q, k, v, causal=causal, dropout_p=p, return_lse=True)
    torch.manual_seed(5)
    seed = torch.randint(2**62, (2,), dtype=torch.int64)
    kept = flashgen.dropout_mask(seed, p, num_heads=4, seqlen_q=70, seqlen_kv=101, batch=2)
    right, right_lse = truth(q, k, v, kept * (65536 / kept_of_65536(p)), causal)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    check((out, lse, *gradients), (right, right_lse, *torch.autograd.grad(right, (q, k, v), dout.double())), dtype)
    # The same call by its seed, and the explicit form of its gradients.
    with torch.no_grad():
        assert torch.equal(flashgen.attention(q, k, v, causal=causal, dropout_p=p, dropout_seed=seed), out)
        explicit = flashgen.attention_backward(dout, q, k, v, out, lse, causal=causal, dropout_p=p, dropout_seed=seed)
    check(explicit, gradients, dtype)


def test_varlen() -> None:
    lengths, p, dtype = ((70, 101), (0, 9), (33, 40)), 0.3, torch.bfloat16
    q, k, v = draw((103,), 2, dtype, 0), draw((150,), 1, dtype, 1), draw((150,), 1, dtype, 2)
    starts = [torch.tensor([0, *(pair[side] for pair in lengths)]).cumsum(0).int() for side in (0, 1)]
    seed = torch.tensor([77, 5])
    out = flashgen.attention(q, k, v, causal=True, dropout_p=p, dropout_seed=seed, cu_seqlens_q=starts[0],
                             cu_seqlens_kv=starts[1])
    kept = flashgen.dropout_mask(seed, p, num_heads=2, seqlen_q=103, seqlen_kv=101, cu_seqlens_q=starts[0])
    weights, parts = kept * (65536 / kept_of_65536(p)), []
    for i, (rows, keys) in enumerate(lengths):
        first, first_key = int(starts[0][i]), int(starts[1][i])
        parts.append(truth(*(t[None, begin:begin + count] for t, begin, count in (
            (q, first, rows), (k, first_key, keys), (v, first_key, keys))), weights[:, first:first + rows, :keys],
            True)[0][0])
    right = torch.cat(parts)
    check((out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))),
          (right, *torch.autograd.grad(right.square().sum(), (q, k, v))), dtype)


def test_the_choice_does_not_hang_on_tiles() -> None:
    """With scores of 0 and the identity as V, the result shows each weight: the same for all tiles and head dims."""
    seed, p, keys = torch.tensor([9, 1]), 0.4, 64
    kept = flashgen.dropout_mask(seed, p, num_heads=2, seqlen_q=150, seqlen_kv=keys)[0].transpose(0, 1)
    for head_dim, tile in ((64, None), (64, Tile(m=64, n=32)), (64, Tile(m=128, n=48)), (128, Tile(m=64, n=16))):
        spec = Spec(name="t", family="fa2", pass_="fwd", arch="sm_90", dtype="bf16", head_dim_qk=head_dim, tile=tile,
                    head_dim_v=64, dropout=True)
        q, k = torch.zeros(1, 150, 2, head_dim).bfloat16(), torch.zeros(1, keys, 2, head_dim).bfloat16()
        v = torch.eye(keys).bfloat16()[None, :, None].expand(1, keys, 2, keys).contiguous()
        out = flashgen.attention(q, k, v, spec=spec, dropout_p=p, dropout_seed=seed)
        assert torch.equal(out[0] != 0, kept)


@pytest.mark.parametrize("head_dims, fields, call", [
    ((64, 64), {"causal": True, "dtype": "fp16"}, Call(((100, 180),), 4, 2, dlse=True, dropout_p=0.5)),
    ((64, 64), {"window": True}, Call(((140, 130),), window=(40, 20), dropout_p=0.2)),
    ((128, 128), {"kv_layout": "varlen"}, Call(((70, 100), (0, 50), (30, 0)), rest=(5, 9), dropout_p=0.17)),
    ((192, 128), {}, Call(((70, 100),), dropout_p=0.9)),
], ids=str)
def test_gradients_in_all_orders(head_dims: tuple[int, int], fields: dict[str, Any], call: Call) -> None:
    in_all_orders(backward_spec("fa2", "sm_90", head_dims, dropout=True, **fields), (call,))


@pytest.mark.parametrize("policy", ["random", "lazy", "eager"])
def test_results_do_not_hang_on_the_schedule(policy: str) -> None:
    q, k, v = (draw((1, 90), 1, torch.bfloat16, i).detach() for i in range(3))
    with scheduled(Schedule(policy, 3)):
        found = flashgen.attention(q, k, v, dropout_p=0.5, dropout_seed=torch.tensor([4, 4]))
    assert torch.equal(found, flashgen.attention(q, k, v, dropout_p=0.5, dropout_seed=torch.tensor([4, 4])))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")
def test_graphs_and_checkpoints_draw_the_same_seed() -> None:
    q, k, v = (draw((1, 40), 1, torch.bfloat16, i) for i in range(3))

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flashgen.attention(q, k, v, causal=True, dropout_p=0.5).float().square().sum()

    def gradients(function: Any) -> tuple[Tensor, ...]:
        torch.manual_seed(11)
        return torch.autograd.grad(function(q, k, v), (q, k, v))

    eager = gradients(loss)
    assert not torch.equal(torch.autograd.grad(loss(q, k, v), (q,))[0], eager[0])  # another call, another seed
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    # The sums of dq are added in no fixed order.
    for found in (gradients(compiled), gradients(lambda *x: checkpoint(loss, *x, use_reentrant=False))):
        check(found, eager, torch.float16)


@pytest.mark.parametrize("fields", [{"pass_": "fwd"}, {"pass_": "bwd", "kernel": "gradients"}], ids=str)
def test_verify_takes_kernels_with_dropout(fields: dict[str, Any]) -> None:
    """With a probability that keeps all weights: then the truth is that of other kernels."""
    spec = Spec(name="t", family="fa2", arch="sm_90", dtype="bf16", head_dim_qk=64, dropout=True, **fields)
    rows = verify_spec([spec], problems=[next(iter(op_of(spec).problems(spec, lower(spec), 0, True)))],
                       emulate=True)
    assert rows and all(row.ok for row in rows)


@pytest.mark.parametrize("score, dtype", [("none", torch.bfloat16), ("-3 * tanh(score - 0.5)", torch.float16)])
def test_expressions_and_sinks(score: str, dtype: torch.dtype) -> None:
    """A mask over a tensor, a score that falls, so that its slopes have a sign, and a sink, which is never dropped."""
    p, seed = 0.3, torch.tensor([3, 3])
    q, k, v = draw((1, 70), 2, dtype, 0), draw((1, 90), 1, dtype, 1), draw((1, 90), 1, dtype, 2)
    doc = (torch.arange(90) // 23).int()[None]
    sink = torch.tensor([0.5, -1.0], requires_grad=True)
    variant = flashgen.variant(score, "doc[batch, kv_pos] == doc[batch, q_pos]", sink="per_head", params={
        "doc": {"type": "tensor", "dtype": "int32", "shape": ["batch", "seqlen_kv"]}})
    out, lse = flashgen.attention(q, k, v, spec=variant, params={"doc": doc, "sink": sink}, dropout_p=p,
                                  dropout_seed=seed, return_lse=True)
    kept = flashgen.dropout_mask(seed, p, num_heads=2, seqlen_q=70, seqlen_kv=90)
    queries, keys, values = (t.double().transpose(1, 2) for t in (q, k, v))
    plain = queries @ keys.mT * q.shape[-1] ** -0.5
    scores = (plain if score == "none" else -3 * torch.tanh(plain - 0.5)).masked_fill(
        doc[0, 20:, None] != doc[0], -torch.inf)
    beside = torch.cat((scores, sink.double()[None, :, None, None].expand(1, 2, 70, 1)), -1)
    weights = torch.softmax(beside, -1)[..., :-1] * kept * (65536 / kept_of_65536(p))
    right = (weights @ values).transpose(1, 2)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    leaves = (q, k, v, sink)
    check((out, lse, *torch.autograd.grad(out, leaves, dout)),
          (right, beside.logsumexp(-1), *torch.autograd.grad(right, leaves, dout.double())), dtype, of_sums=1)


def test_gradients_of_parameters() -> None:
    """Kernels add them up where a weight was kept and where it was not: ALiBi, by its slopes."""
    p, seed = 0.3, torch.tensor([3, 4])
    q, k, v = (draw((1, 70), 2, torch.float16, i) for i in range(3))
    slope = torch.tensor([0.1, 0.02], requires_grad=True)
    variant = flashgen.variant("score - slope[head_q] * abs(q_pos - kv_pos)", params={
        "slope": {"type": "tensor", "dtype": "float32", "shape": ["num_heads_q"]}})
    out = flashgen.attention(q, k, v, spec=variant, params={"slope": slope}, dropout_p=p, dropout_seed=seed)
    kept = flashgen.dropout_mask(seed, p, num_heads=2, seqlen_q=70, seqlen_kv=70)
    queries, keys, values = (t.double().transpose(1, 2) for t in (q, k, v))
    distance = (torch.arange(70)[:, None] - torch.arange(70)).abs()
    scores = queries @ keys.mT * q.shape[-1] ** -0.5 - slope.double()[:, None, None] * distance
    right = (torch.softmax(scores, -1) * kept * (65536 / kept_of_65536(p)) @ values).transpose(1, 2)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).half()
    found, wanted = (torch.autograd.grad(result, (q, k, v, slope), with_respect.to(result.dtype))
                     for result, with_respect in ((out, dout), (right, dout)))
    check(found, wanted, torch.float16, of_sums=1)


def test_a_named_spec_has_its_kernels_with_dropout() -> None:
    q, k, v = (draw((1, 40), 1, torch.bfloat16, i).detach() for i in range(3))
    arguments = {"causal": True, "dropout_p": 0.5, "dropout_seed": torch.tensor([1, 2])}
    found = flashgen.attention(q, k, v, **arguments, spec="fa2_fwd")
    assert torch.equal(found, flashgen.attention(q, k, v, **arguments))
    sums = Spec(name="t", family="fa2", pass_="fwd", arch="sm_90", dtype="bf16", head_dim_qk=64, causal=True,
                normalize="none", lse=False)
    with pytest.raises(UnsupportedError, match="dropout"):
        flashgen.attention(q, k, v, **arguments, spec=sums)
