"""What several test modules share: the reference as a stand-in kernel, and one judged call."""
from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

import flashgen
from flashgen.codegen.families.fa3 import launch, split
from flashgen.codegen.spec.spec import Spec
from flashgen.codegen.target import TARGETS
from flashgen.codegen.warpgroup import WARPGROUP_ROWS
from flashgen.runtime.ops.attention.problem import Inputs, Problem
from flashgen.runtime.select import lookup
from flashgen.runtime.verify.compare import check, named
from flashgen.runtime.verify.expression_mods import ExpressionMods
from flashgen.runtime.verify.reference import reference

SPECIALS = (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf))


def attention_by_reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: bool = False,
                           max_seqlen_q: int | None = None, max_seqlen_kv: int | None = None,
                           out: torch.Tensor | None = None, spec: object = None,
                           params: Mapping[str, Any] | None = None, **keywords: Any) -> Any:
    """flashgen.attention's signature over the fp64 reference."""
    mods = ExpressionMods.of(spec, params) if isinstance(spec, Spec) else None
    exact, lse = reference(q, k, v, mods=mods, **keywords)
    result = exact.to(q.dtype) if out is None else out.copy_(exact)
    return (result, lse.float()) if return_lse else result


@contextmanager
def tiles_of_warpgroups(most: int | None = 4) -> Iterator[None]:
    """fa3 launches whose query tiles are of so many warpgroups, or of as many as the kernel has if those are fewer,
    whatever families/fa3/split.py holds best for the call. None: what it holds best."""
    def cut_launch(cut: split.TileConfig, num_sms: int, shape: split.ProblemShape, *, splits: bool, fixed: bool
                   ) -> tuple[split.TileConfig, split.SplitPlan]:
        if most is None:
            return split.cut_launch(cut, num_sms, shape, splits=splits, fixed=fixed)
        cut = cut._replace(rows=min(cut.rows, WARPGROUP_ROWS * most))
        grid = split.TileGrid.of(cut, num_sms, shape)
        return cut, grid.plan_splits()[0] if splits else split.SplitPlan.none(grid.tiles)

    with mock.patch.object(launch, "cut_launch", cut_launch):
        lookup.registry.generation += 1  # calls are prepared anew
        yield
    lookup.registry.generation += 1


def attend(inputs: Inputs, **more: Any) -> Any:
    return flashgen.attention(inputs.q, inputs.k, inputs.v, **inputs.keywords, **more)


def verified(inputs: Inputs, problem: Problem | str = "", *, spec: Spec | None = None,
             lse: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of flashgen.attention from poisoned memory, judged against fp64; lse is empty if not wanted."""
    from flashgen.runtime.ops.attention.op import run_poisoned

    out, found = run_poisoned(inputs, spec=spec, lse=lse)
    check(named(out, found), inputs, label=f"{spec.variant if spec else 'attention'}, {problem}",
          rerun=f"pytest '{os.environ.get('PYTEST_CURRENT_TEST', '').partition(' ')[0]}'")
    return out, torch.empty(0) if found is None else found


def solved(problem: Problem, device: str, *, spec: Spec | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    return verified(problem.make_inputs(device), problem, spec=spec)


def assert_one_rounding_apart(found: torch.Tensor, expected: torch.Tensor, inputs: Inputs) -> None:
    """`out` of one kernel from two machines, whose fp32 sums and exponentials differ in the last bits.

    Those bits decide which of two neighbours in 16 bits a weight is rounded to, and then the result. Neighbours are at
    most `unit` times the value apart, so a result may move by unit * (weights @ |v|) before it is rounded itself.
    """
    assert found.dtype == expected.dtype and found.shape == expected.shape
    for name, test in SPECIALS:
        assert torch.equal(test(found), test(expected)), f"{name} in different places"
    unit = torch.finfo(inputs.q.dtype).eps
    spread, _ = reference(inputs.q, inputs.k, inputs.v.abs().nan_to_num(0.0, 0.0), **inputs.keywords)
    allowed = unit * (2 * found.abs().maximum(expected.abs()).double() + spread)
    excess = ((found.double() - expected.double()).abs() - allowed).where(expected.isfinite(), -torch.inf)
    if excess.numel() and excess.max() > 0:
        at = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
        raise AssertionError(f"{int((excess > 0).sum())} of {excess.numel()} elements, the worst at {list(at)}: "
                             f"{found[at].item()!r} and {expected[at].item()!r}, allowed {allowed[at].item():.3e}")


def runs_here(spec: Spec) -> bool:
    """Whether a variant is for the current device; for cc 9.0 where there is none, so that tests collect anywhere."""
    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    return TARGETS[spec.arch].runs_on(10 * major + minor)
