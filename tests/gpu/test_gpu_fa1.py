"""FlashAttention-1 on a device: every shipped forward, other head dims, long sequences, and its own gradients.

test_gpu_backward.py runs the shipped backward."""
from __future__ import annotations

import pytest
import torch
from kit import runs_here, verified

import flashgen
from flashgen.codegen.spec.spec import Spec, load_specs, spec_path
from flashgen.runtime.ops.attention.problem import Problem
from flashgen.runtime.verify.compare import check_bits
from flashgen.runtime.verify.gradients import gradients
from flashgen.runtime.verify.verify import verify_spec

pytestmark = pytest.mark.gpu
FORWARD = [spec for spec in load_specs(spec_path("fa1_fwd")).specs if runs_here(spec)]


@pytest.mark.parametrize("spec", FORWARD, ids=[f"{s.variant}.{s.arch}" for s in FORWARD])
@pytest.mark.time_limit(300)
def test_verify(spec: Spec, cuda: str) -> None:
    failures = [row for row in verify_spec([spec], path="fa1_fwd") if not row.ok]
    assert not failures, "\n\n".join(row.message for row in failures[:3])


@pytest.mark.parametrize("head_dims", [(96, 96), (192, 128), (8, 24), (256, 256)], ids=lambda d: f"d{d[0]}v{d[1]}")
def test_other_head_dims_by_a_spec_of_ones_own(head_dims: tuple[int, int], device: str) -> None:
    spec = FORWARD[-1].with_(head_dim_qk=head_dims[0], head_dim_v=head_dims[1])
    problem = Problem(2, 200, 333, 6, 2, *head_dims, causal=spec.causal, dtype=spec.dtype)
    verified(problem.make_inputs(device), problem, spec=spec)


def test_a_thousand_visits_add_no_error(device: str) -> None:
    """The division at each visit rounds; its errors must not add up to one that shows."""
    for dtype in ("bf16", "fp16"):
        problem = Problem(1, 130, 2**17 + 3, 2, 1, 64, 64, dtype=dtype)
        spec = next(s for s in FORWARD if (s.dtype, s.head_dim_qk, s.causal) == (dtype, 64, False))
        verified(problem.make_inputs(device), problem, spec=spec)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_gradients_by_the_name_of_the_forward(head_dim: int, causal: bool, device: str) -> None:
    """Right, with the same bits each time, whatever runs beside them."""
    q, k, v = (torch.randn(2, rows, heads, head_dim, device=device, dtype=torch.bfloat16, requires_grad=True)
               for rows, heads in ((700, 8), (1100, 4), (1100, 4)))
    out = flashgen.attention(q, k, v, causal=causal, spec="fa1_fwd")
    assert isinstance(out, torch.Tensor)
    dout = torch.randn_like(out)
    first = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    right = gradients(dout, q.detach(), k.detach(), v.detach(), causal=causal)
    for name, one, truth in zip("qkv", first, right, strict=True):
        assert (one.double() - truth).norm() < 1e-2 * truth.norm(), name
    for _ in range(4):
        for name, one, other in zip("qkv", first, torch.autograd.grad(out, (q, k, v), dout, retain_graph=True),
                                    strict=True):
            check_bits(one, other, f"d{name}")
