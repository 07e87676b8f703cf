"""Which kernels the gradients of a call with a spec get: those of the same expressions, of a family that has them."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import flashgen
from flashgen.codegen.families.registry import fastest_first
from flashgen.codegen.spec.spec import Spec
from flashgen.errors import UnsupportedError
from flashgen.runtime.select.differentiated import backward_specs
from flashgen.runtime.select.handles import handle_of, opened
from flashgen.runtime.select.lookup import _kinds_of, _matching, archs_for
from flashgen.runtime.select.selector import Wanted

WANTED = Wanted("bf16", 64, 64, True, False, "dense", True, op="attention_backward", traits=(("kernel", "gradients"),))
FORWARD = {"name": "mine", "family": "fa3", "pass_": "fwd", "arch": "sm_90a", "dtype": "bf16", "head_dim_qk": 64,
           "p_operand": "shared", "q_stages": 1}


def found(spec: Any, wanted: Wanted = WANTED, cc: int = 90) -> Spec:
    handle, archs = handle_of(spec), archs_for(cc)
    kinds = _kinds_of(wanted, archs, fastest_first(wanted.op))
    return _matching(backward_specs(handle, opened(handle), kinds, wanted.op), replace(wanted, spec=handle), archs)


def test_what_forward_specs_say_of_gradients() -> None:
    """Their tiles and families say nothing of them; fa3 takes no expressions, so fa2 serves on Hopper, too."""
    capped = "2.0 * tanh(score / 2.0)"
    for spec in ("softcap", flashgen.variant(capped, causal=True, family="fa3", arch="sm_90a"),
                 flashgen.variant(capped), Spec(**FORWARD, score=capped, causal=True)):
        one = found(spec)
        assert (one.family, one.pass_, one.kernel, one.arch) == ("fa2", "bwd", "gradients", "sm_90a")
        assert (one.causal, one.lse, one.score != "none") == (True, True, True)
    assert found("softcap", cc=80).arch == "sm_80"
    assert found(flashgen.variant(sink="per_head"), cc=120).sink == "per_head"
    assert found("fa3_bwd").family == "fa3"


def test_calls_that_a_spec_does_not_serve() -> None:
    for changes, words in (({"head_dim_qk": 96, "head_dim_v": 96}, "no variant of it is of the call's dtype"),
                           ({"traits": (("kernel", "gradients"), ("deterministic", True))}, "deterministic")):
        with pytest.raises(UnsupportedError, match=words):
            found("document", replace(WANTED, causal=False, **changes))
