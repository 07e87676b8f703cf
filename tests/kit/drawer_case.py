"""What a conformance case of the PTX drawer is: one kernel as text, its inputs, and the numpy model of what it writes.

Cases are data, so that whatever runs kernels (a GPU, an emulator) can take the same set: `drawer_kernels.CASES`.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from flashgen.codegen.plan import Plan
from flashgen.codegen.render import reached_headers
from flashgen.codegen.source import Source
from flashgen.codegen.wgmma import HEADER, WgmmaShape, render_wgmma
from flashgen.runtime.compile.cubin import Cubin

Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class TensorMapSpec:
    """The arguments of cuTensorMapEncodeTiled. Lists have the contiguous dimension first; strides are in bytes."""
    buffer: str
    element: str                 # "u8", "bf16" or "f32"
    dims: tuple[int, ...]
    strides: tuple[int, ...]     # of all dimensions but the first
    box: tuple[int, ...]
    swizzle: int = 0             # bytes: 0, 32, 64, 128

    @property
    def element_bytes(self) -> int:
        return {"u8": 1, "bf16": 2, "f32": 4}[self.element]

    @property
    def box_bytes(self) -> int:
        return int(np.prod(self.box)) * self.element_bytes


@dataclasses.dataclass(frozen=True)
class Case:
    """A kernel `entry(const __grid_constant__ Params p)`; Params holds the maps, then the pointers.

    `inputs(rng)` fills every buffer, those the kernel writes included; `model(inputs)` gives what the written ones hold
    afterwards. Values agree if |found - expected| <= absolute + relative * |expected|; with both 0, bit for bit, except
    that any float NaN equals any other.
    """
    name: str
    headers: tuple[str, ...]                # below flashgen/ptx, without .cuh
    pointers: Mapping[str, str]             # buffer -> C type of its elements
    body: str
    inputs: Callable[[np.random.Generator], Arrays]
    model: Callable[[Arrays], Arrays]
    maps: Mapping[str, TensorMapSpec] = dataclasses.field(default_factory=dict)
    shapes: tuple[WgmmaShape, ...] = ()
    threads: int = 32
    blocks: int = 1
    cluster: int = 1
    smem: int = 0                           # bytes of dynamic shared memory
    launches: int = 1                       # more: one after the other, each allowed to start early (griddepcontrol)
    hopper: bool = True                     # needs sm_90a; else sm_80 will do
    absolute: float = 0.0
    relative: float = 0.0

    @property
    def entry(self) -> str:
        """Name of the kernel: not that of the function it tries."""
        return f"{self.name}_kernel"

    @property
    def archs(self) -> tuple[str, ...]:
        return ("sm_90a",) if self.hopper else ("sm_80", "sm_90a")

    @property
    def text(self) -> str:
        includes = [f'#include "flashgen/ptx/{name}.cuh"' for name in self.headers]
        if self.shapes:
            includes.append(f'#include "{HEADER}"')
        members = [f"  TensorMap {name};" for name in self.maps]
        members += [f"  {c_type}* {name};" for name, c_type in self.pointers.items()]
        lines = self.body.strip("\n").splitlines()
        return "\n".join([
            *includes, "", "struct Params {", *members, "};", "",
            f'extern "C" __global__ void __launch_bounds__({self.threads}, 1)',
            f"{self.entry}(const __grid_constant__ Params p) {{", *lines, "}", ""])

    def source(self, arch: str = "sm_90a") -> Source:
        """The text with its headers, the rendered wgmma shapes among them."""
        shapes = render_wgmma(self.shapes)
        plain = self.text.replace(f'#include "{HEADER}"\n', "")
        headers = dict(reached_headers(plain))
        if self.shapes:
            headers |= {**dict(reached_headers(shapes)), HEADER: shapes}
        return Source(self.text, self.entry, f"{self.name}.cu", tuple(sorted(headers.items())), arch)

    def compile(self, arch: str = "sm_90a") -> Cubin:
        """CompileError if it does not compile, spills, or draws a C75xx line."""
        from flashgen.runtime.compile.nvrtc import compile_source

        named = SimpleNamespace(variant=self.entry, kernel_name=f"{self.name}.{arch}", allowed_spill_bytes=0)
        return compile_source(self.source(arch), plan=cast(Plan, named))

    def compare(self, expected: Arrays, found: Arrays) -> list[str]:
        """One line per buffer that disagrees, with the first place where it does."""
        lines = []
        for name, want in expected.items():
            bad = np.flatnonzero(~self._agrees(want, found[name]).ravel())
            if bad.size:
                at = int(bad[0])
                lines.append(f"{self.name}: {name} differs in {bad.size} of {want.size} places, first at "
                             f"{[int(i) for i in np.unravel_index(at, want.shape)]}: expected {want.ravel()[at]!r}, "
                             f"found {found[name].ravel()[at]!r}")
        return lines

    def _agrees(self, want: np.ndarray, got: np.ndarray) -> Any:
        assert want.shape == got.shape and want.dtype == got.dtype, (self.name, want.shape, got.shape)
        if want.dtype.kind != "f":
            return want == got
        with np.errstate(invalid="ignore"):
            error = np.abs(got.astype(np.float64) - want)
            near = error <= self.absolute + self.relative * np.abs(want.astype(np.float64))
        same = want.view(f"u{want.itemsize}") == got.view(f"u{want.itemsize}")
        if self.absolute == self.relative == 0.0:
            near[:] = False
        return near | same | (np.isnan(want) & np.isnan(got))
