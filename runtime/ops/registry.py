"""The operations: one row each, and the lookup from a spec. An operation is imported when it is asked for."""
from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

from flashgen.errors import UnsupportedError

if TYPE_CHECKING:
    from flashgen.codegen.spec.spec import Spec
    from flashgen.runtime.measure.suite import Bench
from flashgen.runtime.ops.op import Op

# folder: (family, pass) of the kernels that answer it
OPS: dict[str, tuple[tuple[str, str], ...]] = {
    "attention": (("fa2", "fwd"), ("fa3", "fwd")),
    "mla_decode": (("flashmla", "decode"), ("flashmla", "schedule")),
}


def op_of(spec: Spec) -> Op:
    return cast("Op", import_module(f"{__package__}.{_name_of(spec)}.op"))


def bench_of(spec: Spec) -> Bench:
    return cast("Bench", import_module(f"{__package__}.{_name_of(spec)}.bench").BENCH)


def _name_of(spec: Spec) -> str:
    key = (spec.family, spec.pass_)
    for name, kernels in OPS.items():
        if key in kernels:
            return name
    raise UnsupportedError(f"no operation for family {spec.family}, pass {spec.pass_}", where=spec.variant,
                           allowed=", ".join("/".join(key) for kernels in OPS.values() for key in kernels))
