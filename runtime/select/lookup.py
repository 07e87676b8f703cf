"""From a call to a kernel: precompiled ones first (bundles, then the cache), else compiled.

A call names what it needs (Wanted). Each kernel that could serve it differs from it only in its family, its target and
in what it can do beyond (writing lse). Results are memoised, so this runs once per kind of call, device and process.

The faster family serves where it can; `why` says which does, and what the faster one lacks. A bundle is there to be
used: its kernels come first, and only among them does the family decide.
"""
from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from flashgen.codegen.expr.tree import Param
from flashgen.codegen.families.family import DenseCall, Family
from flashgen.codegen.families.registry import FAMILIES, fastest_first, lower, served_unasked
from flashgen.codegen.families.shared.launch import Sizes
from flashgen.codegen.plan import Plan
from flashgen.codegen.slots import mask_choice
from flashgen.codegen.spec.expressions import SINK
from flashgen.codegen.target import TARGETS
from flashgen.errors import BundleError, PlanError, SpecError, UnsupportedError
from flashgen.log import logger
from flashgen.runtime.launch.driver import device_facts
from flashgen.runtime.launch.engines import engine_of
from flashgen.runtime.select.bundle import Bundle
from flashgen.runtime.select.handles import Form, forget_paths, form, opened, title
from flashgen.runtime.select.selector import DROPOUT, Selector, Wanted, score_of, selector, serving
from flashgen.runtime.select.variant import Variant

if TYPE_CHECKING:
    from flashgen.codegen.spec.spec import Spec
    from flashgen.runtime.emulator.kernel import EmulatedKernel
    from flashgen.runtime.launch.kernel import Kernel

EMULATED = -1  # the device index of the CPU, where kernels of any target run; torch's get_device() there, too
EMULATED_FIRST = "sm_90"  # the target whose kernels are emulated where the call leaves a choice
NO_MAPS = ("q, k or v has rows, heads or sequences that overlap (as expanded tensors do) or lie 2^40 bytes apart: "
           "tensor maps cannot describe it")
NOT_ASKED = "it serves devices that no other family has kernels for, and calls that name its spec"


class Choice(NamedTuple):
    """A variant, and in one line why it is this one."""

    spec: Spec
    why: str


class Registry:
    """Bundles, specs and loaded kernels of this process."""

    def __init__(self) -> None:
        self._bundles: list[Bundle] | None = None
        self._opened: dict[str, Variant | tuple[Spec, ...]] = {}  # by handle; specs of a Variant follow from the call
        self._kernels: dict[tuple[Wanted, int], Kernel | EmulatedKernel] = {}
        self._read: dict[str, tuple[tuple[Param, ...], Form]] = {}  # what variants of a handle read of each call
        self._lock = threading.RLock()  # a signal handler that calls a kernel may come while one is being found
        self.generation = 0  # changes when what was memoised elsewhere may no longer be the first choice

    def in_child(self) -> None:
        """In a fork: a thread that does not exist here may have held the lock, and no CUDA context came along."""
        self._lock = threading.RLock()
        self._kernels = {key: kernel for key, kernel in self._kernels.items() if key[1] == EMULATED}
        self.generation += 1

    def load_bundle(self, directory: str | Path) -> Bundle:
        """Serve the precompiled kernels of `directory` (written by `flashgen bundle`) from now on, without a compiler,
        before those of older bundles. BundleError if its manifest is damaged or of an incompatible flashgen."""
        bundle = Bundle.load(directory)
        with self._lock:
            self._bundles = [bundle, *self._search_path()]
            self._kernels.clear()
            self.generation += 1
        return bundle

    def _search_path(self) -> list[Bundle]:
        if self._bundles is None:
            paths = os.environ.get("FLASHGEN_BUNDLE_PATH", "").split(os.pathsep)
            self._bundles = [_from_search_path(path) for path in paths if path]
        return self._bundles

    def reload(self) -> None:
        """Read spec files anew: what changed in them counts from the next call on, also in compiled graphs.

        Each file is otherwise read once per process, and each relative path is looked up once per working directory.
        """
        with self._lock:
            for memo in (self._opened, self._read, self._kernels):
                memo.clear()
            forget_paths()
            _shipped.cache_clear()
            self.generation += 1

    def _open(self, handle: str) -> Variant | tuple[Spec, ...]:
        if handle not in self._opened:
            self._opened[handle] = opened(handle)
        return self._opened[handle]

    def params(self, handle: str) -> tuple[Param, ...]:
        """What variants of a handle read of each call, sorted by name, the sink last."""
        return self._params_and_form(handle)[0]

    def form(self, handle: str) -> Form:
        """What sorts the values of a call's parameters."""
        return self._params_and_form(handle)[1]

    def _params_and_form(self, handle: str) -> tuple[tuple[Param, ...], Form]:
        found = self._read.get(handle)
        if found is None:
            spec = self._open(handle)
            known = [p for one in spec for p in one.expressions.params] if isinstance(spec, tuple) else spec.params
            declared = [p for one in spec for p in one.params] if isinstance(spec, tuple) else spec.fields["params"]
            by_name = {param.name: param for param in known if param != SINK}
            params = (*(by_name[name] for name in sorted(by_name)), *((SINK,) if SINK in known else ()))
            found = self._read[handle] = params, form(handle, params, [param.name for param in declared])
        return found

    def kernel(self, wanted: Wanted, device_index: int) -> Kernel | EmulatedKernel:
        """The kernel for a call on cuda:<device_index>, whose context is current, or on the EMULATED one.

        Raises UnsupportedError where none can serve it (or none may be compiled), and what building it raises.
        """
        found = self._kernels.get((wanted, device_index))
        if found is None:
            with self._lock:
                found = self._kernels.get((wanted, device_index))
                if found is None:
                    found, reason = self._find(wanted, device_index)
                    logger().debug("%s: %s on device %d; %s", _asked(wanted), found.plan.kernel_name, device_index,
                                   reason)
                    self._kernels[wanted, device_index] = found
        return found

    def num_sms(self, device_index: int) -> int:
        """Of a device, or of the EMULATED one: what persistent grids are sized for."""
        if device_index == EMULATED:
            from flashgen.runtime.emulator.kernel import emulated_num_sms

            return emulated_num_sms()
        return device_facts(device_index).num_sms

    def for_sizes(self, wanted: Wanted, device_index: int, sizes: Sizes) -> Wanted:
        """`wanted` with what the sizes of the call make the better choice: without a look at any kernel."""
        if wanted.kv_layout == "varlen" or wanted.window or not wanted.tensor_maps or not self._has_twins(wanted.spec):
            return wanted
        for family in fastest_first(wanted.op):
            prefer = family.by_op[wanted.op].prefer
            for arch in self._archs(device_index) if prefer else ():
                call = DenseCall(arch, wanted.dtype, wanted.head_dim_qk, wanted.head_dim_v, wanted.causal)
                if prefer and (traits := prefer(call, sizes, self.num_sms(device_index))):
                    return replace(wanted, traits=traits)
        return wanted

    def _has_twins(self, handle: str) -> bool:
        """Whether variants of a handle may differ in `split` and `pack_gqa`: those with expressions cannot."""
        if not handle:
            return True
        from flashgen.codegen.spec.rule import changed

        spec = self._open(handle)
        return isinstance(spec, tuple) and not (spec and all(map(changed, spec)))

    @staticmethod
    def _archs(device_index: int) -> list[str]:
        if device_index == EMULATED:
            return sorted(TARGETS, key=lambda arch: arch != EMULATED_FIRST)
        return archs_for(device_facts(device_index).cc)

    def _find(self, wanted: Wanted, device_index: int) -> tuple[Kernel | EmulatedKernel, str]:
        emulated = device_index == EMULATED
        archs = self._archs(device_index)
        if wanted.spec:
            spec = self._open(wanted.spec)
            families = _families_for(spec, wanted.op, emulated)
            kinds = _kinds_of(wanted, archs, families)
            if any(family.by_op[wanted.op].follows for family in families):
                from flashgen.runtime.select.differentiated import backward_specs  # reads specs

                variants = backward_specs(wanted.spec, spec, kinds, wanted.op)
            else:
                variants = spec.specs(kinds) if isinstance(spec, Variant) else spec
            if wanted.dropout:
                variants = _dropping(variants, archs)
            choice = Choice(_matching(variants, wanted, archs), "its spec is named")
        elif emulated:
            choice = choose(wanted, archs, emulated=True)
        else:
            bundled = next(self._bundled(wanted, archs), None)
            if bundled is not None:
                return loaded(*bundled[1], device_index), f"it is in the bundle {bundled[0].path}"
            choice = choose(wanted, archs)
        return _emulated(choice.spec) if emulated else _compiled(choice.spec, device_index), choice.why

    def _bundled(self, wanted: Wanted, archs: list[str]) -> Iterator[tuple[Bundle, tuple[Plan, bytes]]]:
        """(bundle, plan and image) of what bundles have for the call, the best first."""
        for family in fastest_first(wanted.op, unasked=True):
            for arch in archs if _reads(family, wanted) else ():
                for bundle in self._search_path():
                    for choice in serving(wanted, arch, family):
                        stored = bundle.get(choice)
                        if stored is not None:
                            yield bundle, stored


registry = Registry()
load_bundle, reload = registry.load_bundle, registry.reload  # as flashgen offers them
os.register_at_fork(after_in_child=lambda: registry.in_child())


def _from_search_path(path: str) -> Bundle:
    try:
        return Bundle.load(path)
    except BundleError as err:
        raise BundleError(err.what, where=f"{err.where}, which FLASHGEN_BUNDLE_PATH names", allowed=err.allowed,
                          next=f"{err.next}; or take it off FLASHGEN_BUNDLE_PATH") from err


def form_of(handle: str) -> Form:
    return registry.form(handle)


form_of._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compile calls it while it traces


def archs_for(cc: int) -> list[str]:
    """Targets whose cubins run on a device, the closest first; the `a` twin, which can do more, before the other."""
    fitting = [t for t in TARGETS.values() if t.runs_on(cc)]
    if not fitting:
        raise UnsupportedError(f"compute capability {cc / 10:.1f}" if cc < 200 else f"a device of gfx{cc}",
                               allowed=", ".join(sorted({t.capability for t in TARGETS.values()})),
                               next="flashgen doctor")
    return [t.name for t in sorted(fitting, key=lambda t: (-t.cc, not t.name.endswith("a")))]


def _families_for(found: Variant | tuple[Spec, ...], op: str, emulated: bool) -> tuple[Family, ...]:
    """Families whose kernels may serve a call with this spec: those that serve unasked, and those that it names."""
    named = {spec.family for spec in found} if isinstance(found, tuple) else set()
    return tuple(family for family in fastest_first(op)
                 if (family.name in named if family.named_only else family.emulated or not emulated))


def _kinds_of(wanted: Wanted, archs: list[str], families: tuple[Family, ...]) -> list[dict[str, Any]]:
    """The spec fields that a call fixes, for each family and target that could serve it."""
    return [{"family": family.name, "pass_": family.by_op[wanted.op].name, "arch": arch,
             "dtype": wanted.dtype, "head_dim_qk": wanted.head_dim_qk, "head_dim_v": wanted.head_dim_v,
             "causal": wanted.causal, "window": wanted.window, "kv_layout": wanted.kv_layout,
             **{name: value for name, value in wanted.traits if name in [trait.option for trait in family.traits]},
             **({DROPOUT: True} if wanted.dropout else {})}
            for arch in archs for family in families]


def _reads(family: Family, wanted: Wanted) -> bool:
    """Whether kernels of the family can read the call's tensors, whatever their shapes."""
    return wanted.tensor_maps or not family.needs_maps


def _dropping(variants: tuple[Spec, ...], archs: list[str]) -> tuple[Spec, ...]:
    """The variants of a named spec that have dropout, or can have it, with it; if there are none, all as they are."""
    found: dict[Spec, None] = {}
    for spec in variants:
        if spec.arch in archs:
            with contextlib.suppress(SpecError):
                found[spec.with_(dropout=True)] = None
    return tuple(found) or variants


def _matching(variants: tuple[Spec, ...], wanted: Wanted, archs: list[str]) -> Spec:
    """The variant of a named spec that serves the call best, of the fastest family and for the closest target."""
    by_selector: dict[Selector, list[Spec]] = {}
    for spec in variants:
        plain = selector(spec.fields(), spec.arch)._replace(score=score_of(bool(getattr(spec, DROPOUT, False))))
        by_selector.setdefault(plain, []).append(spec)
    found = [spec for family in fastest_first(wanted.op) for arch in archs
             for choice in serving(wanted, arch, family) for spec in by_selector.get(choice, ())]
    for spec in found:
        if _reads(FAMILIES[spec.family], wanted):
            return spec
    if found:
        raise UnsupportedError(NO_MAPS, where=f"spec={title(wanted.spec)!r}",
                               allowed="tensors whose rows do not overlap",
                               next="leave spec out, or give q.contiguous(), k.contiguous() and v.contiguous()")
    names = sorted({v.variant for v in variants if v.arch in archs})
    raise UnsupportedError(
        f"no variant of it serves {_asked(wanted)} on {archs[0]}", where=f"spec={title(wanted.spec)!r}",
        allowed=", ".join(names[:8]) + (" ..." if len(names) > 8 else "") if names
        else f"its archs are {', '.join(sorted({v.arch for v in variants}))}",
        next="add the missing values to the spec, or leave spec out")


def why(wanted: Wanted, cc: int) -> str:
    """One line: which kernel serves a call on a device of compute capability `cc` (10 * major + minor) where no bundle
    has one, and what keeps the faster families from it. UnsupportedError where nothing serves it."""
    return choose(wanted, archs_for(cc)).why


def choose(wanted: Wanted, archs: list[str], *, emulated: bool = False) -> Choice:
    """The shipped variant that serves the call, or one made for head dims that no shipped spec lists.

    The fastest family that has one serves, with that for the first of `archs`; `emulated`: of the families that serve
    CPU tensors. UnsupportedError if none has one.
    """
    missing: list[str] = []
    for family in fastest_first(wanted.op, unasked=True, emulated=emulated):
        found = NOT_ASKED if family.fallback and served_unasked(archs, wanted.op) else _variant(family, wanted, archs)
        if not isinstance(found, str):
            return Choice(found, "; ".join([f"{family.name}: {found.variant}.{found.arch}", *missing]))
        missing.append(f"not {family.name}: {found}")
    raise UnsupportedError(f"no shipped spec serves {_asked(wanted)} on {archs[0]}", allowed="; ".join(missing),
                           next="flashgen list")


def _variant(family: Family, wanted: Wanted, archs: list[str]) -> Spec | str:
    """The family's variant for the call, shipped or made after a shipped one; where there is none, why."""
    from flashgen.codegen.spec.fields import rows

    if not _reads(family, wanted):
        return NO_MAPS
    shipped = _shipped()
    choices = [choice for arch in archs for choice in serving(wanted, arch, family)]
    for choice in choices:
        if choice in shipped:
            return shipped[choice]
    if wanted.dropout:
        plain = _variant(family, replace(wanted, dropout=False), archs)
        if isinstance(plain, str):
            return plain
        return plain.with_(dropout=True) if hasattr(family.options, DROPOUT) else "it has no dropout"
    dims: dict[str, Any] = {"head_dim_qk": wanted.head_dim_qk, "head_dim_v": wanted.head_dim_v}
    models = {choice._replace(**dims): spec for choice, spec in shipped.items()
              if spec.name == f"{family.name}_{choice.pass_}" and spec.arch in archs}
    if not any(spec.family == family.name and spec.arch in archs for spec in shipped.values()):
        return f"no shipped spec of it lists {' or '.join(archs)}"
    fitting = [models[choice] for choice in choices if choice in models]
    if not fitting:
        return f"its shipped specs do not list {_asked(wanted)}"
    for spec in fitting:
        if family.tiles and family.tiles.serves(spec.arch, mask_choice(spec.causal, spec.window), *dims.values()):
            # What the model overrides, it overrides for its own head dims.
            made = spec.with_(**{row.attribute: row.default for row in rows() if row.override}, **dims)
            with contextlib.suppress(PlanError):  # a backward has a table of its own
                lower(made)
                return made
    return f"it has no tile for head dims {tuple(dims.values())}"


@functools.cache
def _shipped() -> dict[Selector, Spec]:
    from flashgen.codegen.spec.spec import load_specs, shipped_spec_paths

    found: dict[Selector, Spec] = {}
    for path in shipped_spec_paths():
        for spec in load_specs(path).specs:
            found.setdefault(selector(spec.fields(), spec.arch), spec)
    return found


def _asked(wanted: Wanted) -> str:
    mask = "window" if wanted.window else "causal" if wanted.causal else "full"
    dims = f"{wanted.dtype}, head dims ({wanted.head_dim_qk}, {wanted.head_dim_v})"
    if wanted.op != "attention":
        in_turns = ", deterministic" if dict(wanted.traits).get("deterministic") else ""
        return f"{wanted.op}, {dims}, {wanted.kv_layout}{in_turns}" + ", dropout" * wanted.dropout
    return f"{dims}, {mask} mask, {wanted.kv_layout}" + ", lse" * wanted.lse + ", dropout" * wanted.dropout


def loaded(plan: Plan, image: bytes, device_index: int) -> Kernel:
    kernel: Kernel = engine_of(plan).load(plan, image, device_index)
    return kernel


def _compiled(spec: Spec, device_index: int) -> Kernel:
    from flashgen.codegen.render import plan_and_source  # bundles serve without the generator

    entry = default_cache().get_or_build(*plan_and_source(spec))
    return loaded(entry.plan, entry.cubin.image, device_index)


def _emulated(spec: Spec) -> EmulatedKernel:
    from flashgen.codegen.render import plan_and_source

    plan, source = plan_and_source(spec)
    kernel: EmulatedKernel = engine_of(plan).emulate(plan, source)
    return kernel


@functools.cache
def default_cache():  # type: ignore[no-untyped-def]  # -> Cache, whose import opens NVRTC's bindings
    from flashgen.runtime.compile.cache import Cache

    return Cache()
