"""Every shipped variant of standard attention for this device, each with the two kernels beside it."""
from __future__ import annotations

import pytest
import torch
from kit import runs_here, verified

import flashgen
from flashgen.codegen.spec.spec import Spec, load_specs, spec_path
from flashgen.runtime.ops.attention.problem import Problem
from flashgen.runtime.verify.compare import check_bits
from flashgen.runtime.verify.verify import verify_spec

pytestmark = pytest.mark.gpu
CALLS = [spec for spec in load_specs(spec_path("standard")).specs if runs_here(spec) and spec.kernel == "values"]
each_call = pytest.mark.parametrize("spec", CALLS, ids=[f"{s.variant}.{s.arch}" for s in CALLS])


@each_call
def test_verify(spec: Spec, cuda: str) -> None:
    failures = [row for row in verify_spec([spec], path="standard") if not row.ok]
    assert not failures, "\n\n".join(row.message for row in failures[:3])


def test_a_score_matrix_of_more_than_2_to_the_31_scores(device: str) -> None:
    """33 heads of 8192 x 8192: the last head has the bits that it has alone. S and P take 12.4 GiB."""
    if torch.cuda.mem_get_info()[0] < 20 << 30:
        pytest.skip("needs 20 GiB of free device memory")
    q = torch.randn(1, 8192, 33, 64, device=device, dtype=torch.bfloat16)
    together = flashgen.attention(q, q, q, spec="standard")
    alone = flashgen.attention(q[:, :, 32:], q[:, :, 32:], q[:, :, 32:], spec="standard")
    check_bits(together[:, :, 32:], alone, "the last head")


@pytest.mark.parametrize("head_dims", [(96, 96), (192, 128), (8, 24)], ids=lambda d: f"d{d[0]}v{d[1]}")
def test_other_head_dims_by_a_spec_of_ones_own(head_dims: tuple[int, int], device: str) -> None:
    spec = CALLS[0].with_(head_dim_qk=head_dims[0], head_dim_v=head_dims[1])
    problem = Problem(2, 200, 333, 6, 2, *head_dims, causal=spec.causal, dtype=spec.dtype)
    verified(problem.make_inputs(device), problem, spec=spec)


def test_a_call_by_name(device: str) -> None:
    q = torch.randn(1, 300, 4, 64, device=device, dtype=torch.bfloat16)
    expected = flashgen.attention(q, q, q, causal=True, spec="fa2_fwd")
    found = flashgen.attention(q, q, q, causal=True, spec="standard")
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
