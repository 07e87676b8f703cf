"""The operations: each row of the registry has what the engines ask for, and each kernel that is shipped has one."""
from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from flashgen.codegen.families import registry as families
from flashgen.codegen.families.registry import FAMILIES
from flashgen.codegen.spec.spec import load_specs, shipped_spec_paths
from flashgen.errors import UnsupportedError
from flashgen.runtime.measure.suite import Bench, Timed
from flashgen.runtime.ops.op import Op
from flashgen.runtime.ops.registry import OPS, op_of

ROOT = Path(__file__).resolve().parents[2]
ENGINES = ("verify", "measure", "emulator")
SPECS = {(spec.family, spec.pass_): spec for path in shipped_spec_paths() for spec in load_specs(path).specs}


def asked(protocol: type) -> dict[str, list[str]]:
    """Parameters of each function of a protocol."""
    return {name: [*inspect.signature(function).parameters][1:] for name, function in vars(protocol).items()
            if inspect.isfunction(function) and not name.startswith("_")}


def test_engines_name_no_operation() -> None:
    """They ask the registry, and know what op.py says of an operation."""
    for path in (path for engine in ENGINES for path in sorted((ROOT / "runtime" / engine).glob("*.py"))):
        imported = re.findall(r"flashgen\.runtime\.ops\.(\w+)", path.read_text())
        assert {*imported} <= {"op", "registry"}, path


@pytest.mark.parametrize("name", sorted({*OPS.values()}))
def test_an_operation_has_what_the_engines_ask_for(name: str) -> None:
    op = import_module(f"flashgen.runtime.ops.{name}.op")
    for function, parameters in asked(Op).items():
        assert [*inspect.signature(getattr(op, function)).parameters][:len(parameters)] == parameters, function


@pytest.mark.parametrize("name", ["attention.bench", "attention.variants", "mla_decode.bench"])
def test_a_bench_has_what_the_engine_asks_for(name: str) -> None:
    bench = import_module(f"flashgen.runtime.ops.{name}").BENCH
    assert isinstance(bench, Bench) and bench.peers and bench.data[0] == "normal"
    for function, parameters in asked(Timed).items():
        assert [*inspect.signature(getattr(bench.timed(), function)).parameters] == parameters, function


def test_every_kernel_answers_one_operation() -> None:
    passes = {(family.name, each.name): each for family in FAMILIES.values() for each in family.passes}
    assert passes.keys() == SPECS.keys() and {each.op for each in passes.values()} == OPS.keys()
    for key, spec in SPECS.items():
        assert op_of(spec).__name__.split(".")[-2] == OPS[passes[key].op]  # type: ignore[attr-defined]


def test_a_kernel_without_an_operation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "op_of", lambda spec: "kv_append")
    spec = SimpleNamespace(family="fa4", pass_="append", variant="x")
    with pytest.raises(UnsupportedError, match=r"(?s)fa4.*allowed: attention, attention_backward, mla_decode"):
        op_of(spec)  # type: ignore[arg-type]
