"""The operations: one row each, and the lookup from a spec. An operation is imported when it is asked for."""
from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

from flashgen.codegen.families import registry as families
from flashgen.errors import UnsupportedError

if TYPE_CHECKING:
    from flashgen.codegen.spec.spec import Spec
    from flashgen.runtime.measure.suite import Bench
from flashgen.runtime.ops.op import Op

# What a pass answers: the folder.
OPS = {"attention": "attention", "mla_decode": "mla_decode", "mla_schedule": "mla_decode"}


def op_of(spec: Spec) -> Op:
    return cast("Op", import_module(f"{__package__}.{_name_of(spec)}.op"))


def bench_of(spec: Spec) -> Bench:
    return cast("Bench", import_module(f"{__package__}.{_name_of(spec)}.bench").BENCH)


def _name_of(spec: Spec) -> str:
    op = families.op_of(spec)
    if op not in OPS:
        raise UnsupportedError(f"no operation for family {spec.family}, pass {spec.pass_}", where=spec.variant,
                               allowed=", ".join(OPS))
    return OPS[op]
