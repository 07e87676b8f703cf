"""The emulator's half of the PTX drawer: the same functions as the device's, and the same results."""
from __future__ import annotations

import re
import zlib
from pathlib import Path

import numpy as np
import pytest
from drawer_kernels import CASES
from emulator_kit import run_case

from flashgen.codegen.render import TEMPLATES
from flashgen.runtime.emulator.schedule import POLICIES, Schedule
from flashgen.runtime.emulator.toolchain import HOST

DEVICE_DRAWER, HOST_DRAWER = TEMPLATES / "include" / "flashgen" / "ptx", HOST / "flashgen" / "ptx"
SIGNATURE = re.compile(r"((?:template <[^;{}]*?>\s*)?)FG_DEVICE\s+([^;{}()]*?\w+)\(([^{};]*?)\)\s*(?=\{|= delete)")


def signatures(header: Path) -> set[str]:
    """Template parameters, result, name and parameter types with defaults; parameter names and line breaks left out."""
    text = re.sub(r"//.*", "", header.read_text())
    return {re.sub(r"\s+", " ", f"{m[1].strip()} {m[2]}({m[3]})").strip() for m in SIGNATURE.finditer(text)}


@pytest.mark.parametrize("name", sorted(path.name for path in DEVICE_DRAWER.glob("*.cuh")))
def test_both_drawers_declare_the_same_functions(name: str) -> None:
    device = signatures(DEVICE_DRAWER / name)
    assert device
    assert signatures(HOST_DRAWER / name) == device


def test_no_function_is_the_hosts_alone() -> None:
    extra = {path.name for path in HOST_DRAWER.glob("*.cuh")} - {path.name for path in DEVICE_DRAWER.glob("*.cuh")}
    assert extra == {"wgmma_shapes.cuh"}  # rendered for each kernel on the device; here it only includes wgmma.cuh


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", CASES)
def test_drawer(name: str, policy: str) -> None:
    case = CASES[name]
    inputs = case.inputs(np.random.default_rng(zlib.crc32(name.encode())))
    found, _ = run_case(case, inputs, Schedule(policy))
    constants = {key: inputs[key] for key, c_type in case.pointers.items() if c_type.startswith("const ")}
    faults = case.compare({**case.model(inputs), **constants}, found)
    assert not faults, "\n".join(faults)
