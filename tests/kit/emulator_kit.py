"""What the emulator's tests share: distinct plans, kernels with a changed text, and conformance cases as launches."""
from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from drawer_case import Arrays, Case
from sampling import ROTATION, in_turn

from flashgen.codegen.families.registry import lower
from flashgen.codegen.families.shared.launch import is_persistent
from flashgen.codegen.plan import Launch, Param, Plan, Region, Role
from flashgen.codegen.render import render
from flashgen.codegen.source import Source
from flashgen.codegen.spec.spec import Spec, load_specs, shipped_spec_paths
from flashgen.errors import VerifyError
from flashgen.runtime.emulator.client import TensorMapPlace
from flashgen.runtime.emulator.kernel import Argument, EmulatedKernel, LaunchShape, Statistics, launch
from flashgen.runtime.emulator.report import KernelFault
from flashgen.runtime.emulator.schedule import POLICIES, Schedule, scheduled
from flashgen.runtime.emulator.toolchain import compile_kernel
from flashgen.runtime.ops.attention.edges import emulated_problems, tile_shape
from flashgen.runtime.ops.attention.op import run_poisoned
from flashgen.runtime.ops.attention.problem import Inputs, Problem
from flashgen.runtime.select import lookup
from flashgen.runtime.verify.compare import check, named
from flashgen.runtime.verify.subject import Subject
from flashgen.runtime.verify.verify import verify_spec


def distinct_plans(family: str, pass_: str = "fwd", step: str = "") -> list[tuple[Spec, Plan]]:
    """One shipped variant for each kernel of a family's pass that differs in more than target, occupancy and compiler
    options. `step`: of a call's kernels, this one alone."""
    found: dict[object, tuple[Spec, Plan]] = {}
    for path in shipped_spec_paths():
        for spec in load_specs(path).specs:
            if (spec.family, spec.pass_) == (family, pass_) and step in ("", spec.kernel):
                plan = lower(spec)
                found.setdefault(text_of(plan), (spec, plan))
    return list(found.values())


def text_of(plan: Plan) -> object:
    """What two plans whose kernels are the same text have in common."""
    constants = tuple((c.name, c.value) for c in plan.constants if c.name != "MIN_BLOCKS_PER_SM")
    return plan.template, plan.element, constants, plan.slots, plan.flags, plan.smem


def shipped(variant: str, arch: str = "sm_90") -> Spec:
    return next(spec for path in shipped_spec_paths() for spec in load_specs(path).specs
                if (spec.variant, spec.arch) == (variant, arch))


def problems_of(spec: Spec, seed: int = 0) -> list[Problem]:
    plan = lower(spec)
    return list(emulated_problems(spec, *tile_shape(plan), seed, persistent=is_persistent(plan)))


def with_nans_in_v(inputs: Inputs) -> Inputs:
    """NaN and infinities in the last keys of each sequence, so that some rows see them and others do not.

    No infinities where scores are so far apart that weights underflow: 0 * inf is NaN in 16 bits, and inf in fp64.
    """
    changed = inputs.mods is not None and inputs.mods.score is not None
    apart = changed or (inputs.softmax_scale or 0.0) * inputs.q.shape[-1] ** 0.5 > 2
    v = inputs.v.clone()
    ends = [v.shape[-3]] if inputs.cu_seqlens_kv is None else inputs.cu_seqlens_kv[1:].tolist()
    for end in ends:
        if end > 4:
            v.narrow(-3, end - 2, 1)[..., ::3] = float("nan")
            v.narrow(-3, end - 3, 1)[..., 1::2] = float("nan" if apart else "-inf")
    return inputs.with_(v=v)


def solve(spec: Spec, inputs: Inputs, schedule: Schedule, label: str = "") -> torch.Tensor:
    """`out` of one launch, judged against fp64."""
    with scheduled(schedule):
        out, lse = run_poisoned(inputs, spec=spec, lse=spec.lse)
    check(named(out, lse), inputs, label=label or spec.variant)
    return out


def failures_in_turn(spec: Spec, number: int, problems: Sequence[Problem]) -> list[str]:
    """What `verify_spec` objects to, "" left out: each problem under one policy, another for the next problem, kernel
    (`number`) and commit; in a soak run under all of them, whose bits must agree."""
    failures: list[str] = []
    for i, problem in enumerate(problems):
        schedules = [Schedule(policy, ROTATION % 2**16) for policy in in_turn(POLICIES, number + i)]
        with mock.patch.object(Subject, "schedules", lambda _, found=schedules: [scheduled(each) for each in found]):
            failures += [row.message for row in verify_spec([spec], problems=[problem], emulate=True) if not row.ok]
    return failures


@contextmanager
def replaced(kernel: EmulatedKernel) -> Iterator[None]:
    """flashgen.attention runs `kernel` whatever spec it is called for."""
    def forget() -> None:
        lookup.registry._kernels.clear()
        lookup.registry.generation += 1

    with mock.patch.object(lookup, "_emulated", lambda _: kernel):
        forget()
        try:
            yield
        finally:
            forget()


def changed(source: Source, file: str, change: Callable[[str], str]) -> Source:
    """`source` with one of its files changed: "kernel" or a header by its name below flashgen/."""
    if file == "kernel":
        return Source(change(source.text), source.entry, source.file_name, source.headers, source.arch)
    headers = tuple((name, change(text) if name == f"flashgen/{file}" else text) for name, text in source.headers)
    assert headers != source.headers, file
    return Source(source.text, source.entry, source.file_name, headers, source.arch)


def caught(spec: Spec, source: Source, schedules: list[Schedule]) -> str:
    """How the emulator or the reference objects to a kernel, "" if neither does."""
    with replaced(EmulatedKernel(lower(spec), source)):
        for schedule in schedules:
            for problem in problems_of(spec):
                for inputs in (problem.make_inputs(), with_nans_in_v(problem.make_inputs())):
                    try:
                        solve(spec, inputs, schedule)
                    except VerifyError as error:
                        return str(error)
    return ""


SCHEDULES = [Schedule("random", 0), Schedule("lazy", 1)]  # what a mutated kernel has to pass


def report_of_fault(spec: Spec, file: str, old: str, new: str) -> str:
    """As `caught`, of the spec's kernel with `old` replaced by `new` in one of its files, named as in `changed`."""
    def plant(text: str) -> str:
        assert old in text, f"the text that the fault replaces is gone: {old}"
        return text.replace(old, new)

    return caught(spec, changed(render(lower(spec)), file, plant), SCHEDULES[:1])


SYNCHRONISING = re.compile(r"(?<![\w.])(?:sync_block|cp_async_wait<[^>]*>|cp_async_commit)\(\);")


def synchronising(spec: Spec) -> list[tuple[str, int, str]]:
    """(file, position, text) of every statement of the kernel and its plain headers that only synchronises."""
    source = render(lower(spec))
    files = [("kernel", source.text)] + [(name.removeprefix("flashgen/"), text) for name, text in source.headers
                                         if not name.startswith("flashgen/ptx/")]
    return [(file, m.start(), m[0]) for file, text in files for m in SYNCHRONISING.finditer(text)]


# ---- conformance cases of the drawer

def case_plan(case: Case) -> Plan:
    return Plan(variant=case.name, target="sm_90a", family="drawer", pass_="case", spec=(), template="", element="",
                constants=(), slots=(), flags=(), params=(Param("p", "i64", "unused"),),
                smem=(Region("MEMORY", 0, case.smem, "all of it"),), roles=(Role("all", case.threads // 32),),
                launch=Launch(case.threads, 1, case.smem, ""))


def run_case(case: Case, inputs: Arrays, schedule: Schedule) -> tuple[Arrays, Statistics]:
    """All buffers after the case's kernel ran on the emulator."""
    tensors = {name: torch.from_numpy(inputs[name].reshape(-1).view(np.uint8).copy()) for name in case.pointers}
    maps_bytes = 128 * len(case.maps)
    packed = bytes(maps_bytes) + struct.pack(f"<{len(tensors)}Q", *[0] * len(tensors))
    packed += bytes(-len(packed) % 64 if case.maps else 0)
    arguments = [Argument(name, tensor, maps_bytes + 8 * i, not case.pointers[name].startswith("const "))
                 for i, (name, tensor) in enumerate(tensors.items())]
    path: Path = compile_kernel(case.source())
    maps = [TensorMapPlace(128 * i, list(tensors).index(m.buffer), m.element_bytes, m.element == "f32", m.swizzle,
                           m.dims, m.strides, m.box) for i, m in enumerate(case.maps.values())]
    shape = LaunchShape((case.blocks, 1, 1), case.threads, case.smem, case.cluster)
    with scheduled(schedule):
        for _ in range(case.launches):
            statistics = launch(case_plan(case), path, packed, arguments, shape, maps)
    return {name: tensor.numpy().view(inputs[name].dtype).reshape(inputs[name].shape)
            for name, tensor in tensors.items()}, statistics


# ---- kernels of a few lines

HEADERS = ("smem", "warp", "cp_async", "ldmatrix")
START = "uint32_t* const shared = reinterpret_cast<uint32_t*>(dyn_smem());\nconst uint32_t t = threadIdx.x;\n"


def small_case(name: str, body: str, headers: tuple[str, ...] = HEADERS, **more: Any) -> Case:
    """A kernel of 64 threads and 1 KiB of shared memory over x (read) and out (written)."""
    def inputs(rng: np.random.Generator) -> Arrays:
        return {"x": np.arange(64, dtype=np.uint32), "out": np.zeros(64, np.uint32)}

    return Case(name, headers, {"x": "const uint32_t", "out": "uint32_t"},
                START + body, inputs, lambda arrays: arrays, **{"threads": 64, "smem": 1024, "hopper": False, **more})


def fault_of(subject: Case, schedule: Schedule | None = None) -> KernelFault:
    with pytest.raises(KernelFault) as caught:
        run_case(subject, subject.inputs(np.random.default_rng(0)), schedule or Schedule())
    return caught.value


@dataclass(frozen=True)
class Site:
    """A statement that only synchronises. Its neighbours tell apart those with one text, in all variants alike."""

    file: str
    statement: str
    before: str
    after: str
    number: int

    def __str__(self) -> str:
        return f"{self.file}: {self.before[-50:]} [{self.statement}] {self.after[:30]} {self.number}"


def sites_in(file: str, text: str, statements: re.Pattern[str]) -> Iterator[tuple[Site, re.Match[str]]]:
    """Each of `statements` in the text of a file, and where."""
    seen: dict[tuple[str, str, str], int] = {}
    for m in statements.finditer(text):
        before, after = text[:m.start()].rstrip().rpartition("\n")[2], text[m.end():].lstrip().partition("\n")[0]
        key = m[0], before.strip(), after.strip()
        seen[key] = seen.get(key, -1) + 1
        yield Site(file, *key, seen[key]), m
