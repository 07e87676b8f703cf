"""A kernel with all its faults in one text, of which a launch has at most one: compiling a text for each took longest.

Which of them is alive comes with a launch, in a parameter that only the mutated kernel has.
"""
from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from emulator_kit import Site, sites_in

from flashgen.codegen.families.registry import lower
from flashgen.codegen.plan import Param
from flashgen.codegen.program import Step
from flashgen.codegen.render import render
from flashgen.codegen.source import Source
from flashgen.codegen.spec.spec import Spec
from flashgen.runtime.emulator.kernel import EmulatedKernel, EmulatedLauncher

PRELUDE = "prelude.cuh"  # which all other files include
SWITCH = """#ifndef FG_FAULT
#define FG_FAULT
static int fg_fault;
__attribute__((noinline, no_sanitize("thread"))) static bool fg_alive(int fault) { return fg_fault == fault; }
__attribute__((noinline, no_sanitize("thread"))) static void fg_choose(int fault) { fg_fault = fault; }
#endif
"""
START = re.compile(r"const __grid_constant__ Params p\) \{")


def plain_files(source: Source) -> Iterator[tuple[str, str]]:
    """(name, text) of the kernel and of its headers, less those that the emulator replaces."""
    yield "kernel", source.text
    for name, text in source.headers:
        if not name.startswith("flashgen/ptx/"):
            yield name.removeprefix("flashgen/"), text


def sites_of(spec: Spec, statements: re.Pattern[str], wanted: Callable[[Site], bool]) -> list[Site]:
    return [site for file, text in plain_files(render(lower(spec))) for site, _ in sites_in(file, text, statements)
            if wanted(site)]


class Mutant(EmulatedKernel):
    """`numbers`: of its faults, from 1. `alive`: the one that launches prepared from now on have; 0: none."""

    def __init__(self, spec: Spec, statements: re.Pattern[str], wanted: Callable[[Site], bool],
                 faults: Mapping[str, tuple[str, str]]) -> None:
        """Each of `statements` that is wanted may be left out, and each of `faults` (text, its replacement) put in:
        both of the two are whole statements, or both are expressions."""
        plan = lower(spec)
        plan = replace(plan, params=(*plan.params, Param("fault", "i32", "the fault that is alive, 0: none")))
        source = render(plan)
        self.numbers: dict[Site | str, int] = {}
        self.alive = 0
        texts = {file: self._with_faults(self._with_gaps(file, text, statements, wanted), faults)
                 for file, text in plain_files(source)}
        kernel, started = START.subn(lambda m: m[0] + " fg_choose(p.fault);", texts["kernel"])
        assert started == 1
        texts[PRELUDE] = SWITCH + texts[PRELUDE]
        headers = tuple((name, texts.get(name.removeprefix("flashgen/"), text)) for name, text in source.headers)
        super().__init__(plan, Source(kernel, source.entry, source.file_name, headers, source.arch))

    def launcher(self, step: Step) -> EmulatedLauncher:
        return super().launcher(step._replace(values={**step.values, "fault": self.alive}))

    def _alive(self, fault: Any) -> str:
        return f"fg_alive({self.numbers.setdefault(fault, len(self.numbers) + 1)})"

    def _with_gaps(self, file: str, text: str, statements: re.Pattern[str], wanted: Callable[[Site], bool]) -> str:
        parts, end = [], 0
        for site, m in sites_in(file, text, statements):
            if wanted(site):
                parts += [text[end:m.start()], f"{{ if (!{self._alive(site)}) {m[0]} }}"]
                end = m.end()
        return "".join(parts) + text[end:]

    def _with_faults(self, text: str, faults: Mapping[str, tuple[str, str]]) -> str:
        for fault, (old, new) in faults.items():
            if old in text:
                alive = self._alive(fault)
                text = text.replace(old, f"if ({alive}) {{ {new} }} else {{ {old} }}" if old.endswith(";") else
                                    f"({alive} ? {new} : {old})")
        return text
