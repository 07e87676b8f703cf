"""Triton as a family: its text, which calls it serves, what it refuses, and how its kernels are built and loaded."""
from __future__ import annotations

import ast
import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from flashgen.codegen.explain.explain import explain
from flashgen.codegen.expr.canon import canonical
from flashgen.codegen.expr.evaluate import evaluate
from flashgen.codegen.expr.params import read_params
from flashgen.codegen.expr.parse import parse
from flashgen.codegen.expr.triton import to_triton
from flashgen.codegen.families.registry import FAMILIES, fastest_first, lower, pass_of, program_of
from flashgen.codegen.families.shared.launch import Sizes, smallest_call
from flashgen.codegen.families.triton.tiles import TILES, TRIED
from flashgen.codegen.plan import Plan
from flashgen.codegen.render import render
from flashgen.codegen.spec.spec import Spec, load_specs, spec_path, variant_spec_paths
from flashgen.codegen.target import TARGETS
from flashgen.errors import EnvironmentError_, PlanError, SpecError
from flashgen.runtime.compile.cache import Cache
from flashgen.runtime.launch import driver
from flashgen.runtime.launch import triton as kernels
from flashgen.runtime.launch.rehearsal import check_launch
from flashgen.runtime.select import lookup
from flashgen.runtime.select.bundle import Bundle, write_bundle
from flashgen.runtime.select.lookup import archs_for, choose
from flashgen.runtime.select.selector import Wanted

BASE: dict[str, Any] = {"name": "t", "family": "triton", "pass_": "fwd", "arch": "sm_90", "dtype": "fp16",
                        "head_dim_qk": 64}
SHIPPED = [spec for name in ("triton_fwd", "triton_bwd") for spec in load_specs(spec_path(name)).specs]
AMD = 942  # as device_facts has a device of gfx942


# ---- text

@pytest.mark.parametrize("spec", SHIPPED[::17], ids=lambda spec: f"{spec.variant}.{spec.arch}")
def test_shipped_variants_are_python_and_survive_json(spec: Spec) -> None:
    plan = lower(spec)
    assert Plan.from_json(plan.to_json()) == plan and render(Plan.from_json(plan.to_json())) == render(plan)
    functions = [node.name for node in ast.parse(render(plan).text).body if isinstance(node, ast.FunctionDef)]
    assert functions[-1] == plan.variant and len(set(functions)) == len(functions)
    check_launch(plan)


@pytest.mark.parametrize("name", [path.stem for path in variant_spec_paths()])
def test_every_variant_ships_with_it(name: str) -> None:
    """Each with a backward beside, unless it has no softmax."""
    found = [spec for spec in load_specs(spec_path(name)).specs if spec.family == "triton"]
    assert {spec.arch for spec in found} == {"sm_90a", "gfx942"}
    for spec in found[::5]:
        ast.parse(render(lower(spec)).text)
        if spec.normalize == "softmax":
            ast.parse(render(lower(spec.with_(pass_="bwd", kernel="key_gradients"))).text)


EXPRESSIONS = ("cap * tanh(score / cap)", "-score", "score - bias[min(max(kv_pos - q_pos, -3), 3) + 3]", "exp(-score)",
               "score if kv_pos <= q_pos and not flag else log(abs(score))", "float(kv_pos % 3 - q_pos // -2)",
               "max(score, 0.5, -score)", "sigmoid(score * 2)", "score + 1 if q_pos == 3 or kv_pos != 2 else score")
PARAMS = {"cap": {"type": "float"}, "flag": {"type": "bool"},
          "bias": {"type": "tensor", "dtype": "float32", "shape": [7]}}


class Operand(np.ndarray):
    """Numbers as blocks of Triton are: with `to`."""

    def to(self, dtype: Any) -> Operand:
        return self.astype(dtype)


def blocks(values: Any) -> Operand:
    return np.asarray(values).view(Operand)


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_printed_expressions_mean_what_torch_evaluates(text: str) -> None:
    """By numpy in the place of Triton, whose operators are spelled alike."""
    tree = canonical(parse(text, read_params(PARAMS), "score"))
    bias = np.arange(7, dtype=np.float32)
    env = {"score": np.linspace(-2, 2, 20, dtype=np.float32).reshape(4, 5),
           "q_pos": np.arange(4, dtype=np.int32)[:, None], "kv_pos": np.arange(5, dtype=np.int32)[None, :]}
    language = SimpleNamespace(
        where=np.where, minimum=np.minimum, maximum=np.maximum, abs=np.abs, exp2=np.exp2, float32=np.float32,
        log2=np.log2)
    scope = {"tl": language, "tanh": np.tanh, "sigmoid": lambda x: 1 / (1 + np.exp(-x)), "user_cap": np.float32(1.5),
             "user_flag": np.int32(1), "user_bias": bias, "clamp_index": lambda i, n: np.clip(i, 0, n - 1),
             "element": lambda t, row, width, column: t[row * width + column], "floor_div": np.floor_divide,
             "floor_mod": np.mod, **{name: blocks(value) for name, value in env.items()}}
    with np.errstate(all="ignore"):
        found = np.broadcast_to(eval(to_triton(tree), scope), (4, 5))
    right = evaluate(tree, {**{name: torch.from_numpy(value) for name, value in env.items()}, "cap": 1.5, "flag": True,
                            "bias": torch.from_numpy(bias)}, torch)
    np.testing.assert_allclose(found, np.broadcast_to(right.numpy(), (4, 5)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("changes, where", [
    ({"tile": {"m": 48, "n": 32}}, "Spec.tile.m"), ({"tile": {"m": 64, "n": 96}}, "Spec.tile.n"),
    ({"roles": {"mma": 6}}, "Spec.roles.mma"), ({"batch_invariant": True}, "Spec.batch_invariant"),
    ({"dropout": True}, "Spec.dropout"), ({"deterministic": True}, "Spec.deterministic"),
    ({"kv_layout": "paged"}, "Spec.kv_layout"), ({"head_dim_qk": 512}, "Spec.head_dim_qk"),
    ({"kernel": "key_gradients"}, "Spec.kernel")], ids=str)
def test_what_is_refused(changes: dict[str, Any], where: str) -> None:
    with pytest.raises(SpecError) as caught:
        Spec(**{**BASE, **changes})
    assert caught.value.where == where and caught.value.allowed


# ---- plans and launches

def test_targets_without_a_row_try_several_tiles() -> None:
    tuned, fixed = lower(Spec(**{**BASE, "arch": "gfx942"})), lower(Spec(**BASE))
    assert [(t.m, t.n, t.warps, t.stages) for t in tuned.tried] == [(t.m, t.n, t.warps, t.stages) for t in TRIED]
    assert "@triton.autotune" in render(tuned).text and not fixed.tried
    assert "autotune" not in render(fixed).text and "tried" not in json.loads(fixed.to_json())
    # The grid is for the least tile, so that every one of them covers all rows.
    for side, name in (("m", "BLOCK_M"), ("n", "BLOCK_N")):
        assert tuned.constant(name) == min(getattr(tile, side) for tile in TRIED)
    # What adds to sums must run once.
    adding = Spec(**{**BASE, "arch": "gfx942", "pass_": "bwd", "kernel": "key_gradients", "score": "score + b[head_q]",
                     "params": {"b": {"type": "tensor", "dtype": "float32", "shape": ["num_heads_q"]}}})
    assert not lower(adding).tried


@pytest.mark.parametrize("target", [t for t in TARGETS.values() if t.is_nvidia], ids=lambda t: t.name)
def test_nvidia_targets_have_tiles_for_all_head_dims(target: Any) -> None:
    for kind in TILES.kinds:
        for mask in ("full", "causal", "window"):
            assert TILES.find(target.name, mask, 256, 256, kind) is not None


def test_grids_and_buffers_of_the_backward() -> None:
    spec = Spec(**{**BASE, "pass_": "bwd", "kernel": "preprocess", "mask": "kv_pos < 2 * q_pos",
                   "tile": {"m": 32, "n": 64}})
    plans = [lower(spec.with_(**dict(kernel))) for kernel in pass_of(spec).kernels]
    strides = {p.name: 8 for plan in plans for p in plan.params if p.name.endswith("_stride")}
    program = program_of(plans[0], Sizes(2, 100, 300, 6, 3, 0.5, strides=strides), 132, *plans[1:])
    assert [(step.kernel, step.grid_x) for step in program.steps] == [
        ("preprocess", 4 * 6 * 2), ("key_gradients", 5 * 3 * 2), ("query_gradients", 4 * 6 * 2)]
    assert program.buffer("delta").shape == (2, 6, 100) and program.buffer("tiles").shape == (48, 5)


def test_explain_shows_the_work() -> None:
    for spec in (SHIPPED[0], SHIPPED[-1]):
        found = explain(spec, batch=2, seqlen_q=256, seqlen_kv=512, num_heads_q=4)
        assert max(map(len, str(found).splitlines())) <= 120
    forward: Any = explain(Spec(**BASE), batch=2, seqlen_q=256, seqlen_kv=512, num_heads_q=4, num_heads_kv=4)
    assert forward.moved["fwd"].flops == 2 * 2 * 4 * 256 * 512 * 128 and forward.blocks == 2 * 4 * 2


# ---- look-up

def wanted(**changes: Any) -> Wanted:
    return Wanted(**{"dtype": "bf16", "head_dim_qk": 64, "head_dim_v": 64, "causal": True, "window": False,
                     "kv_layout": "dense", "lse": True, **changes})


def test_it_serves_devices_that_no_other_family_has() -> None:
    assert archs_for(AMD) == ["gfx942"]
    for head_dim in (64, 72, 192, 256):
        for op, traits in (("attention", ()), *(("attention_backward", (("kernel", kernel),)) for kernel in (
                "preprocess", "key_gradients", "query_gradients"))):
            found = choose(wanted(head_dim_qk=head_dim, op=op, traits=traits), archs_for(AMD)).spec
            assert (found.family, found.arch, found.head_dim_qk) == ("triton", "gfx942", head_dim)


@pytest.mark.parametrize("cc", sorted({target.cc for target in TARGETS.values() if target.is_nvidia}))
def test_no_call_gets_it_unasked_elsewhere(cc: int) -> None:
    assert choose(wanted(), archs_for(cc)).spec.family != "triton"
    with mock.patch.object(lookup, "_shipped", lambda: {}), pytest.raises(lookup.UnsupportedError) as caught:
        choose(wanted(), archs_for(cc))
    assert f"not triton: {lookup.NOT_ASKED}" in caught.value.allowed
    assert fastest_first("attention")[-1].name == "standard"


@pytest.fixture
def on_amd(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A registry on a device of another vendor, whose kernels are stand-ins."""
    monkeypatch.setattr(lookup, "device_facts", lambda index: SimpleNamespace(cc=AMD, num_sms=304))
    monkeypatch.setattr(lookup, "_compiled", lambda spec, index: SimpleNamespace(plan=lower(spec), spec=spec))
    found = lookup.Registry()
    found._bundles = []
    return found


@pytest.mark.parametrize("name", ["softcap", "document"])
def test_a_named_variant_is_served_there(on_amd: Any, name: str) -> None:
    kernel = on_amd.kernel(wanted(spec=name, causal=name == "softcap"), 0)
    assert kernel.plan.kernel_name.startswith(f"{name}_bf16_d64_triton") and kernel.plan.target == "gfx942"
    gradients = on_amd.kernel(wanted(spec=name, causal=name == "softcap", op="attention_backward",
                                     traits=(("kernel", "key_gradients"),)), 0)
    assert gradients.plan.family == "triton" and gradients.plan.step == "key_gradients"


def test_devices_of_rocm_are_asked_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-", name="MI300X", multi_processor_count=304)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    driver.device_facts.cache_clear()
    try:
        assert driver.device_facts(0) == driver.DeviceFacts(0, "MI300X", AMD, 304)
        driver.adopt_context(0)  # there is no CUDA context to adopt
    finally:
        driver.device_facts.cache_clear()


# ---- kernels

def test_bundles_carry_the_text(tmp_path: Path) -> None:
    plan = lower(Spec(**BASE))
    cache = Cache(tmp_path / "cache")
    entry = cache.build(plan, render(plan))
    again = Cache(tmp_path / "cache").get(plan, render(plan))
    assert again is not None and again.hit and again.cubin.image == render(plan).text.encode()
    folder = write_bundle([entry], tmp_path / "bundle")
    assert sorted(path.suffix for path in folder.iterdir()) == [".json", ".json", ".py"]
    bundle = Bundle.load(folder)
    [selector] = bundle.selectors()
    assert bundle.get(selector) == (plan, render(plan).text.encode())
    with mock.patch.object(kernels, "TritonKernel", side_effect=lambda *given: given) as made:
        assert lookup.loaded(plan, b"text", 3) == (plan, b"text", 3) and made.call_count == 1


def test_without_triton_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = lower(Spec(**BASE))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentError_, match="Triton is not installed") as caught:
        kernels.TritonKernel(plan, render(plan).text.encode(), 0)
    assert caught.value.next == 'pip install "flashgen[triton]"'


def test_on_the_cpu_the_interpreter_has_to_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = lower(Spec(**BASE))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(EnvironmentError_, match="asked for") as caught:
        kernels.InterpretedKernel(plan, render(plan))
    assert "TRITON_INTERPRET=1" in caught.value.allowed and "flashgen verify" in caught.value.next


def test_launches_bring_pointers_and_numbers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In the order of the kernel's arguments; None for what may be null and is, but not for other pointers."""
    plan, asked = lower(Spec(**BASE)), []
    jitted = {(1,): lambda *given, **options: asked.append((given, options))}
    monkeypatch.setattr(kernels, "_function", lambda *_: jitted)
    [step] = program_of(plan, smallest_call(plan), 1).steps
    kernel = kernels.TritonKernel(plan, b"", 0)
    kernel.launcher(step, ["lse", "q", "k", "v", "out"])(0, [0, 16, 32, 0, 64])
    [(given, options)] = asked
    assert [None if p is None else p.data_ptr() for p in given[:5]] == [16, 32, 0, 64, None]
    assert given[0].dtype == torch.float16 and options == {"num_warps": 8, "num_stages": 3}
    assert list(given[5:]) == [step.values[p.name] for p in plan.params[5:]]
    with pytest.raises(PlanError, match="no call gives it the pointer lse"):
        kernel.launcher(step, ["q", "k", "v", "out"])


def test_engines_are_rows() -> None:
    from flashgen.runtime.launch.engines import ENGINES

    assert {family.engine for family in FAMILIES.values()} == set(ENGINES)
