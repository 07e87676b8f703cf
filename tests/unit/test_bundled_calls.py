"""Calls that bundles serve: all kernels of a call, or none; and never a family that serves by name alone."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from tiny import tiny_plan, tiny_source

from flashgen.cli.build import bundle
from flashgen.codegen.families.registry import FAMILIES, fastest_first, lower
from flashgen.codegen.families.shared.launch import Sizes
from flashgen.codegen.spec.spec import Spec
from flashgen.errors import UnsupportedError
from flashgen.runtime.compile.cache import Cache
from flashgen.runtime.ops import front
from flashgen.runtime.select import lookup
from flashgen.runtime.select.bundle import write_bundle
from flashgen.runtime.select.lookup import archs_for, choose
from flashgen.runtime.select.selector import Wanted, selector

FORWARD = Wanted("bf16", 64, 64, False, False, "dense", True)
BACKWARD = dataclasses.replace(FORWARD, op="attention_backward", traits=(("kernel", "preprocess"),))
SIZES = Sizes(1, 9, 9, 2, 2)
KERNELS = ("preprocess", "gradients", "postprocess")
NAMED_ONLY = [family for family in FAMILIES.values() if family.named_only]
AT_HAND = SimpleNamespace(plan=SimpleNamespace(kernel_name="compiled"))  # what stands for a kernel that no bundle has


def specs_of(family: str, pass_: str, kernels: tuple[str | None, ...], arch: str = "sm_90") -> list[Spec]:
    return [Spec.model_validate({"name": family, "family": family, "pass": pass_, "kernel": kernel, "arch": arch,
                                 "dtype": "bf16", "head_dim_qk": 64}) for kernel in kernels]


@pytest.fixture
def bundled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[Spec]], lookup.Registry]:
    """From specs to a front door that finds their kernels in a bundle, for a Hopper that is not there."""
    pytest.importorskip("cuda.bindings.nvrtc")
    plan = tiny_plan()
    entry = Cache(tmp_path / "cache").get_or_build(plan, tiny_source(plan))
    monkeypatch.setattr(lookup, "device_facts", lambda index: SimpleNamespace(cc=90, num_sms=132))
    monkeypatch.setattr(lookup, "loaded", lambda plan, image, index: SimpleNamespace(plan=plan))
    registry = lookup.Registry()
    monkeypatch.setattr(front, "kernel_for", lambda wanted, device, sizes=None: registry.kernel(wanted, 0))

    def load(specs: list[Spec]) -> lookup.Registry:
        entries = [dataclasses.replace(entry, plan=lower(spec)) for spec in specs]
        registry.load_bundle(write_bundle(entries, tmp_path / "bundle"))
        return registry
    return load


def test_a_bundle_serves_all_kernels_of_a_call(bundled: Any) -> None:
    bundled(specs_of("fa2", "bwd", KERNELS))
    with mock.patch.object(lookup, "choose", side_effect=AssertionError("a bundle serves it")):
        found = front.kernels_for(BACKWARD, torch.device("cuda", 0), SIZES)
    assert [kernel.plan.step for kernel in found] == list(KERNELS)


def test_a_bundle_without_one_of_the_kernels_is_an_error(bundled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel that is missing is no reason to take one of another family in its place."""
    bundled(specs_of("fa2", "bwd", ("preprocess", "postprocess")))
    monkeypatch.setattr(lookup, "_compiled", lambda spec, index: SimpleNamespace(plan=lower(spec)))
    with pytest.raises(UnsupportedError, match=r"fa2_bf16_d64_bwd_preprocess\.sm_90 .* without") as caught:
        front.kernels_for(BACKWARD, torch.device("cuda", 0), SIZES)
    assert "flashgen bundle" in caught.value.next


# ---- families that serve by name alone

@pytest.mark.parametrize("family", NAMED_ONLY, ids=lambda family: family.name)
def test_no_bundle_makes_a_call_take_one(family: Any, bundled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of kernels that would serve it: the call gets what it gets without the bundle."""
    monkeypatch.setattr(lookup, "_compiled", lambda spec, index: AT_HAND)
    for wanted in (FORWARD, BACKWARD):
        if wanted.op in family.by_op:
            answer = family.by_op[wanted.op]
            registry = bundled(specs_of(family.name, answer.name, answer.kernel_names))
            assert registry._search_path()[0].selectors()
            assert registry.kernel(wanted, 0) is AT_HAND


def test_the_command_refuses_what_no_call_would_get(tmp_path: Path) -> None:
    for names in (["standard"], ["fa2_fwd", "fa1_bwd"]):
        with pytest.raises(UnsupportedError, match="which serves calls that name no spec"):
            bundle(names, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("family", NAMED_ONLY, ids=lambda family: family.name)
def test_no_look_up_takes_one(family: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where nothing else serves the call."""
    for wanted in (FORWARD, BACKWARD):
        if wanted.op not in family.by_op:
            continue
        assert family in fastest_first(wanted.op) and family not in fastest_first(wanted.op, unasked=True)
        answer = family.by_op[wanted.op]
        shipped = {selector(spec.fields(), spec.arch): spec
                   for spec in specs_of(family.name, answer.name, answer.kernel_names)}
        monkeypatch.setattr(lookup, "_shipped", lambda found=shipped: found)
        for emulated in (False, True):
            with pytest.raises(UnsupportedError, match="no shipped spec serves") as caught:
                choose(wanted, archs_for(90), emulated=emulated)
            assert family.name not in caught.value.allowed
