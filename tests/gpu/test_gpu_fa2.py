"""Every shipped variant for this device: `verify_spec`, random problems, and identities that no rounding excuses."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kit import attend, runs_here, verified
from strategies import problems

from flashgen.codegen.families.registry import lower
from flashgen.codegen.spec.spec import Spec, load_specs, shipped_spec_paths
from flashgen.runtime.ops.attention.edges import masks
from flashgen.runtime.ops.attention.op import run_poisoned
from flashgen.runtime.ops.attention.problem import Problem
from flashgen.runtime.verify.compare import check_bits
from flashgen.runtime.verify.verify import verify_spec

pytestmark = pytest.mark.gpu
SHIPPED = [(path, spec) for path in shipped_spec_paths() for spec in load_specs(path).specs
           if runs_here(spec) and (spec.family, spec.pass_) == ("fa2", "fwd")]
each_shipped = pytest.mark.parametrize("path, spec", SHIPPED, ids=[f"{s.variant}.{s.arch}" for _, s in SHIPPED])
UNSHIPPED_HEAD_DIMS = [(40, 40), (72, 72), (80, 80), (224, 224), (64, 128), (8, 24)]


def examples(count: int) -> settings:
    return settings(deadline=None, derandomize=True, max_examples=count,
                    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@each_shipped
def test_verify(path: str, spec: Spec, cuda: str) -> None:
    failures = [row for row in verify_spec([spec], path=str(path)) if not row.ok]
    assert not failures, "\n\n".join(row.message for row in failures[:3])


@each_shipped
@examples(6)
@given(data=st.data())
def test_random_problems(path: str, spec: Spec, device: str, data: st.DataObject) -> None:
    plan = lower(spec)
    problem = data.draw(problems(
        masks=masks(spec), varlen=spec.kv_layout == "varlen", dtype=spec.dtype,
        head_dims=(spec.head_dim_qk, spec.head_dim_v), tile_m=plan.constant("BLOCK_M"),
        tile_n=plan.constant("BLOCK_N")))
    verified(problem.make_inputs(device), problem, spec=spec, lse=spec.lse)


@pytest.mark.parametrize("head_dims", UNSHIPPED_HEAD_DIMS, ids=lambda d: f"d{d[0]}v{d[1]}")
@pytest.mark.time_limit(300)  # each mask and layout is compiled first
@examples(12)
@given(data=st.data())
def test_other_head_dims_are_compiled(head_dims: tuple[int, int], device: str, data: st.DataObject) -> None:
    problem = data.draw(problems(head_dims=head_dims, tile_m=64, tile_n=32))
    verified(problem.make_inputs(device), problem)


SELF = Problem(2, 200, 333, 6, 2, seed=5)
LAYOUTS = {"dense": SELF, "varlen": replace(SELF, batch=3, seqlen_q=(200, 1, 77), seqlen_kv=(333, 40, 0))}
each_layout = pytest.mark.parametrize("problem", LAYOUTS.values(), ids=LAYOUTS)


@each_layout
@pytest.mark.parametrize("causal", [False, True, "top_left"])
def test_shared_kv_heads_equal_their_copies(problem: Problem, causal: bool | str, device: str) -> None:
    inputs = replace(problem, causal=causal).make_inputs(device)
    copies = inputs.with_(k=inputs.k.repeat_interleave(3, -2), v=inputs.v.repeat_interleave(3, -2))
    for shared, copied in zip(run_poisoned(inputs), run_poisoned(copies), strict=True):
        assert shared is not None and copied is not None
        check_bits(shared, copied, "one kv head for three query heads")


@each_layout
def test_heads_keep_to_themselves(problem: Problem, device: str) -> None:
    """Reversing q's and kv's heads reverses the result and changes no bit."""
    inputs = problem.make_inputs(device)
    out, lse = run_poisoned(inputs)
    flipped, flipped_lse = run_poisoned(inputs.with_(q=inputs.q.flip(-2), k=inputs.k.flip(-2), v=inputs.v.flip(-2)))
    assert lse is not None and flipped_lse is not None
    check_bits(flipped.flip(-2), out, "out")
    check_bits(flipped_lse.flip(-2 if problem.varlen else 1), lse, "lse")


@each_layout
@pytest.mark.parametrize("causal", [False, True])
def test_window_past_both_ends(problem: Problem, causal: bool, device: str) -> None:
    """A bound that reaches past every key is no bound, however large: sums with it do not wrap."""
    inputs = replace(problem, causal=causal).make_inputs(device)
    for near in ((600, 600), (5, 600), (600, 5)):
        expected = run_poisoned(inputs.with_(window=near))[0]
        for bound in (2**31 - 1, 2**31 - 200):
            window = tuple(bound if side == 600 else side for side in near)
            check_bits(run_poisoned(inputs.with_(window=window))[0], expected, f"window {window}")


@each_layout
def test_arguments_that_change_no_bit(problem: Problem, device: str) -> None:
    """lse asked for or not, out given or not, the default scale spelled out, max_seqlen given: one result."""
    inputs = replace(problem, causal=True).make_inputs(device)
    out, lse = attend(inputs, return_lse=True)
    check_bits(attend(inputs), out, "without lse")
    check_bits(attend(inputs.with_(softmax_scale=64**-0.5)), out, "scale given")
    given_out = torch.full_like(out, torch.nan)
    assert attend(inputs, out=given_out).data_ptr() == given_out.data_ptr()
    check_bits(given_out, out, "out given")
    if problem.varlen:
        for longest in (1, 200, 4096):
            hinted, hinted_lse = attend(inputs, return_lse=True, max_seqlen_q=longest, max_seqlen_kv=333)
            check_bits(hinted, out, f"max_seqlen_q {longest}")
            check_bits(hinted_lse, lse, f"max_seqlen_q {longest}")
