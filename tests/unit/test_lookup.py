"""Which kernel serves a call: the faster family where it can, bundles first, and why."""
from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import flashgen
from flashgen.codegen.families.registry import FAMILIES, fastest_first, lower
from flashgen.codegen.families.shared.launch import Sizes
from flashgen.codegen.spec.spec import Spec
from flashgen.codegen.target import TARGETS
from flashgen.errors import EnvironmentError_, UnsupportedError
from flashgen.runtime.launch import driver
from flashgen.runtime.select import lookup
from flashgen.runtime.select.handles import handle_of
from flashgen.runtime.select.lookup import EMULATED, NO_MAPS, Registry, archs_for, choose, why
from flashgen.runtime.select.selector import Selector, Wanted, selector


def spec(family: str, **fields: Any) -> Spec:
    return Spec(**{"name": f"{family}_fwd", "family": family, "pass": "fwd", "dtype": "bf16", "head_dim_qk": 128,  # type: ignore
                   "arch": "sm_90a" if family == "fa3" else "sm_90", **fields})


def wanted(**changes: Any) -> Wanted:
    return Wanted(**{"dtype": "bf16", "head_dim_qk": 128, "head_dim_v": 128, "causal": False, "window": False,
                     "kv_layout": "dense", "lse": False, **changes})


SHIPPED = [*(spec("fa2", head_dim_qk=dim, causal=causal, window=window)
             for dim in (64, 128) for causal, window in ((False, False), (True, False), (False, True))),
           spec("fa2", kv_layout="varlen"), spec("fa3"), spec("fa3", causal=True)]


@pytest.fixture
def shipped(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[Spec]], None]:
    """Sets what ships; at first SHIPPED, with fa3 tiles up to head dims (128, 128)."""
    def ship(specs: list[Spec]) -> None:
        table = {selector(s.fields(), s.arch): s for s in specs}
        monkeypatch.setattr(lookup, "_shipped", lambda: table)

    table: Any = FAMILIES["fa3"].tiles
    monkeypatch.setitem(vars(table), "rows", tuple(row for row in table.rows if row.head_dim_qk <= 128))
    ship(SHIPPED)
    return ship


def test_the_twin_with_more_features_comes_first() -> None:
    assert archs_for(90) == ["sm_90a", "sm_90"] and archs_for(80) == ["sm_80"]
    assert archs_for(89) == ["sm_89", "sm_86", "sm_80"] and archs_for(100) == ["sm_100a"]
    with pytest.raises(UnsupportedError, match=r"7\.5"):
        archs_for(75)


@pytest.mark.parametrize("changes, cc, variant, reason", [
    ({}, 90, "fa3_fwd_bf16_d128.sm_90a", ""),
    ({"lse": True, "causal": True}, 90, "fa3_fwd_bf16_d128_causal.sm_90a", ""),
    ({"tensor_maps": False}, 90, "fa2_fwd_bf16_d128.sm_90", f"not fa3: {NO_MAPS}"),
    ({"head_dim_qk": 64, "head_dim_v": 64}, 90, "fa3_fwd_bf16_d64.sm_90a", ""),  # made, though fa2 ships it
    ({"head_dim_qk": 96, "head_dim_v": 72}, 90, "fa3_fwd_bf16_d96v72.sm_90a", ""),
    ({"head_dim_qk": 192}, 90, "fa2_fwd_bf16_d192v128.sm_90", "not fa3: it has no tile for head dims (192, 128)"),
    ({"head_dim_qk": 96, "head_dim_v": 96, "tensor_maps": False}, 90, "fa2_fwd_bf16_d96.sm_90", f"not fa3: {NO_MAPS}"),
    ({"window": True}, 90, "fa2_fwd_bf16_d128_window.sm_90", "not fa3: its shipped specs do not list"),
    ({"kv_layout": "varlen"}, 90, "fa2_fwd_bf16_d128_varlen.sm_90", "not fa3: its shipped specs do not list"),
])
def test_families(changes: dict[str, Any], cc: int, variant: str, reason: str, shipped: Any) -> None:
    line = why(wanted(**changes), cc)
    family = variant.partition("_")[0]
    assert line.startswith(f"{family}: {variant}") and reason in line and bool(reason) is ("not fa3" in line)
    chosen = choose(wanted(**changes), archs_for(cc)).spec
    assert chosen.family == family and f"{chosen.variant}.{chosen.arch}" == variant


def test_on_other_cards(shipped: Any) -> None:
    shipped([*SHIPPED, spec("fa2", arch="sm_80")])
    assert why(wanted(), 80) == "fa2: fa2_fwd_bf16_d128.sm_80; not fa3: no shipped spec of it lists sm_80"
    with pytest.raises(UnsupportedError, match=r"(?s)fp16.*on sm_90a.*not fa3: .*not fa2: "):
        why(wanted(dtype="fp16"), 90)


def test_what_a_model_overrides_is_its_own(shipped: Any) -> None:
    shipped([spec("fa3", stages=2), spec("fa2", stages=3, blocks_per_sm=1)])
    for tensor_maps in (True, False):
        made = choose(wanted(head_dim_qk=72, head_dim_v=72, tensor_maps=tensor_maps), archs_for(90)).spec
        assert made.stages is None and made.blocks_per_sm is None and made.head_dim_qk == made.head_dim_v == 72


@pytest.mark.parametrize("asked", [{}, *({"op": "attention_backward", "traits": (("kernel", kernel),)} for kernel in (
    "preprocess", "gradients", "postprocess"))], ids=lambda asked: str(asked.get("traits", "")))
def test_every_call_is_served_on_every_card(asked: dict[str, Any]) -> None:
    """With what really ships, by a kernel that has a plan: fa3's backward has none for head dims (8, 256)."""
    for target in (target for target in TARGETS.values() if target.is_nvidia):
        for dims in ((64, 64), (192, 128), (8, 256), (72, 72)):
            for kv_layout in ("dense", "varlen"):
                for mask in ({}, {"causal": True}, {"window": True}):
                    call = wanted(head_dim_qk=dims[0], head_dim_v=dims[1], kv_layout=kv_layout, lse=True,
                                  **mask, **asked)
                    choice = choose(call, archs_for(target.cc))
                    lower(choice.spec)
                    assert choice.spec.lse and TARGETS[choice.spec.arch].runs_on(target.cc)
                    found = choice.spec
                    assert (found.head_dim_qk, found.head_dim_v, found.kv_layout) == (*dims, kv_layout)


# ---- the registry

class StubBundle:
    path = Path("b")

    def __init__(self, *specs: Spec) -> None:
        self._specs = {selector(s.fields(), s.arch): s for s in specs}

    def get(self, choice: Selector) -> tuple[Any, bytes] | None:
        found = self._specs.get(choice)
        return None if found is None else (SimpleNamespace(kernel_name=f"{found.variant}.{found.arch}"), b"")


@pytest.fixture
def registry(shipped: Any, monkeypatch: pytest.MonkeyPatch) -> Registry:
    """On a device of compute capability 9.0; kernels are stand-ins that say how they came."""
    def loaded(plan: Any, image: bytes, device_index: int) -> Any:
        return SimpleNamespace(plan=plan, how="bundle")

    def made(how: str) -> Callable[..., Any]:
        return lambda found, *_: SimpleNamespace(
            plan=SimpleNamespace(kernel_name=f"{found.variant}.{found.arch}"), how=how)

    monkeypatch.setattr(lookup, "device_facts", lambda index: SimpleNamespace(cc=90))
    monkeypatch.setattr(lookup, "loaded", loaded)
    monkeypatch.setattr(lookup, "_compiled", made("compiled"))
    monkeypatch.setattr(lookup, "_emulated", made("emulated"))
    found = Registry()
    found._bundles = []
    return found


def served(registry: Registry, call: Wanted, device: int = 0) -> tuple[str, str]:
    kernel: Any = registry.kernel(call, device)
    return kernel.plan.kernel_name, kernel.how


def test_a_call_is_compiled_for_the_faster_family(registry: Registry, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "flashgen"):
        assert served(registry, wanted()) == ("fa3_fwd_bf16_d128.sm_90a", "compiled")
        assert served(registry, wanted(tensor_maps=False)) == ("fa2_fwd_bf16_d128.sm_90", "compiled")
    assert [NO_MAPS in record.message for record in caplog.records] == [False, True]


def test_bundles_come_first(registry: Registry, caplog: pytest.LogCaptureFixture) -> None:
    registry._bundles = [StubBundle(spec("fa2"))]  # type: ignore[list-item]
    with caplog.at_level(logging.DEBUG, "flashgen"):
        assert served(registry, wanted()) == ("fa2_fwd_bf16_d128.sm_90", "bundle")
    assert "bundle b" in caplog.text
    assert served(registry, wanted(causal=True)) == ("fa3_fwd_bf16_d128_causal.sm_90a", "compiled")


def test_the_faster_family_comes_first_among_bundles(registry: Registry) -> None:
    registry._bundles = [StubBundle(spec("fa2", arch="sm_90a")), StubBundle(spec("fa3"))]  # type: ignore[list-item]
    assert served(registry, wanted()) == ("fa3_fwd_bf16_d128.sm_90a", "bundle")
    assert served(registry, wanted(tensor_maps=False)) == ("fa2_fwd_bf16_d128.sm_90a", "bundle")


def test_cpu_tensors_get_fa2_unless_a_spec_is_named(registry: Registry) -> None:
    assert served(registry, wanted(), EMULATED) == ("fa2_fwd_bf16_d128.sm_90", "emulated")
    named = handle_of(spec("fa3"))
    assert served(registry, wanted(spec=named), EMULATED) == ("fa3_fwd_bf16_d128.sm_90a", "emulated")


def test_a_named_spec_is_not_replaced(registry: Registry) -> None:
    named = handle_of(spec("fa3"))
    assert served(registry, wanted(spec=named)) == ("fa3_fwd_bf16_d128.sm_90a", "compiled")
    with pytest.raises(UnsupportedError, match=r"(?s)tensor maps cannot.*next: leave spec out"):
        registry.kernel(wanted(spec=named, tensor_maps=False), 0)
    with pytest.raises(UnsupportedError, match="no variant of it serves"):
        registry.kernel(wanted(spec=named, causal=True), 0)


def test_a_named_file_with_both_families(registry: Registry) -> None:
    registry._opened["both"] = (spec("fa2", name="x", arch="sm_90"), spec("fa3", name="x"))
    assert served(registry, wanted(spec="both")) == ("x_bf16_d128_fa3.sm_90a", "compiled")
    assert served(registry, wanted(spec="both", tensor_maps=False)) == ("x_bf16_d128.sm_90", "compiled")


def test_of_a_named_file_the_variant_that_the_call_had_better_have(registry: Registry) -> None:
    """Whatever the order in the file."""
    kinds: list[dict[str, bool]] = [{"lse": False}, {"pack_gqa": True, "split": True}, {"split": True}, {},
                                    {"batch_invariant": True}]
    for named in (kinds, kinds[::-1]):
        registry._opened["all"] = tuple(spec("fa3", **kind) for kind in named)
        for traits, end in (((), ""), ((("split", True),), "_split"),
                            ((("split", True), ("pack_gqa", True)), "_split_packed"), ((("pack_gqa", None),), "")):
            registry._kernels.clear()
            call = wanted(spec="all", traits=traits)
            assert served(registry, call) == (f"fa3_fwd_bf16_d128{end}.sm_90a", "compiled")


@pytest.mark.parametrize("sizes, variant", [
    ((1, 2112, 4000, 12, 12), "fa3_fwd_bf16_d128"),           # a tile for each SM
    ((1, 300, 4000, 2, 2), "fa3_fwd_bf16_d128_split"),        # few
    ((2, 1, 4000, 32, 8), "fa3_fwd_bf16_d128_split_packed"),  # heads share a tile: fewer still
    ((99, 1, 4000, 32, 8), "fa3_fwd_bf16_d128_split_packed"),
    ((1, 2112, 4000, 12, 3), "fa3_fwd_bf16_d128"),            # as many packed as not
    ((1, 1, 4000, 65, 1), "fa3_fwd_bf16_d128_split"),         # more heads than rows
])
def test_sizes_decide_before_a_kernel_is_loaded(sizes: tuple[int, ...], variant: str,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    """So that one compiled kernel is enough where FLASHGEN_NO_COMPILE is set."""
    asked: list[str] = []

    class Loaded(Exception):
        pass

    def compiled(found: Spec, _: int) -> Any:
        asked.append(found.variant)
        raise Loaded

    monkeypatch.setattr(lookup, "device_facts", lambda index: SimpleNamespace(cc=90, num_sms=132))
    monkeypatch.setattr(lookup, "_compiled", compiled)
    registry = Registry()
    registry._bundles = []
    with pytest.raises(Loaded):
        registry.kernel(registry.for_sizes(wanted(), 0, Sizes(*sizes)), 0)
    assert asked == [variant]


@pytest.mark.parametrize("changes", [{"score": "2 * score"}, {"sink": "per_head"}, {"normalize": "none", "lse": False}])
def test_variants_with_expressions_have_no_twins(changes: dict[str, Any]) -> None:
    """So that calls of all sizes share a kernel."""
    registry = Registry()
    sizes = Sizes(2, 1, 4000, 32, 8)
    for given in (spec("fa3", **changes), flashgen.variant(**changes)):
        asked = wanted(spec=handle_of(given))
        assert registry.for_sizes(asked, EMULATED, sizes) == asked
    registry._opened["both"] = (spec("fa3"), spec("fa3", **changes))
    assert dict(registry.for_sizes(wanted(spec="both"), EMULATED, sizes).traits)["pack_gqa"]


# ---- what a call says of its tensors

class Asked(Exception):
    pass


@pytest.mark.parametrize("make, fit", [
    (lambda x: x, True),
    (lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), True),
    (lambda x: x[:, :1].expand(2, 16, 2, 64), False),
    (lambda x: x[:1].expand(2, 16, 2, 64), False),
    (lambda x: x[:, :0], True),
])
def test_calls_say_whether_maps_fit(make: Callable[[torch.Tensor], torch.Tensor], fit: bool,
                                    monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Wanted] = []

    def kernel(call: Wanted, device: int) -> Any:
        asked.append(call)
        raise Asked

    monkeypatch.setattr(lookup.registry, "kernel", kernel)
    q = torch.randn(2, 16, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(Asked):
        flashgen.attention(q, make(q), make(q))
    names = [family.name for family in fastest_first("attention")]
    assert asked[0].tensor_maps is fit and names.index("fa3") < names.index("fa2")


def test_a_fork_has_a_new_lock_and_no_kernel_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:  # B119
    """What is emulated goes on; calls that were prepared for a device are prepared anew, and refused by name."""
    registry, kernels = Registry(), {(wanted(), EMULATED): object(), (wanted(), 0): object()}
    registry._kernels.update(kernels)  # type: ignore[arg-type]
    registry._lock.acquire()
    before = registry.generation
    registry.in_child()
    assert list(registry._kernels) == [(wanted(), EMULATED)] and registry.generation > before
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(registry._lock.acquire, timeout=0).result()
    monkeypatch.setattr(driver, "_used_before_fork", True)
    driver.api.cache_clear()
    with pytest.raises(EnvironmentError_, match=r"(?s)forked after CUDA was used.*spawn"):
        driver.api()
