"""The emulator and the GPU agree: the same text on the same problem, but for one rounding of each weight."""
from __future__ import annotations

import shutil

import pytest
import torch
from emulator_kit import problems_of, with_nans_in_v
from kit import assert_one_rounding_apart, runs_here

from flashgen.codegen.spec.spec import Spec, load_specs, shipped_spec_paths
from flashgen.runtime.emulator.schedule import Schedule, scheduled
from flashgen.runtime.emulator.toolchain import COMPILERS
from flashgen.runtime.ops.attention.op import run_poisoned
from flashgen.runtime.select.handles import with_siblings

pytestmark = pytest.mark.gpu
SPECS = [spec for path in shipped_spec_paths() for spec in load_specs(path).specs  # of several kernels the last
         if runs_here(spec) and spec.pass_ == "fwd" and with_siblings(spec)[-1] == spec]


@pytest.mark.time_limit(300)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.variant}.{spec.arch}")
def test_same_results(spec: Spec, cuda: str) -> None:
    if not any(map(shutil.which, COMPILERS)):
        pytest.skip("no C++ compiler")
    for problem in problems_of(spec)[:4]:
        for inputs in (problem.make_inputs(), with_nans_in_v(problem.make_inputs())):
            with scheduled(Schedule()):
                emulated, emulated_lse = run_poisoned(inputs, spec=spec, lse=spec.lse)
            there = inputs.with_(**{name: getattr(inputs, name).to(cuda) for name in ("q", "k", "v")},
                                 **{name: None if getattr(inputs, name) is None else getattr(inputs, name).to(cuda)
                                    for name in ("cu_seqlens_q", "cu_seqlens_kv")})
            real, real_lse = run_poisoned(there, spec=spec, lse=spec.lse)
            assert_one_rounding_apart(emulated, real.cpu(), inputs)
            if emulated_lse is not None and real_lse is not None:
                torch.testing.assert_close(emulated_lse, real_lse.cpu(), rtol=1e-5, atol=1e-5)
