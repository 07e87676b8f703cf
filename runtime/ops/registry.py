"""The operations of flashgen, a row each, and the look-up from a spec. Their work is imported when asked for."""
from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, cast

from flashgen.errors import UnsupportedError
from flashgen.runtime.ops.attention.signature import ATTENTION
from flashgen.runtime.ops.attention_backward.signature import ATTENTION_BACKWARD
from flashgen.runtime.ops.mla_decode.signature import MLA_DECODE, MLA_SCHEDULE
from flashgen.runtime.ops.signature import Signature

if TYPE_CHECKING:
    from flashgen.codegen.spec.spec import Spec
    from flashgen.runtime.measure.lineage import Lineage
    from flashgen.runtime.measure.suite import Bench
    from flashgen.runtime.ops.op import Op

SIGNATURES: tuple[Signature, ...] = (ATTENTION, ATTENTION_BACKWARD, MLA_DECODE, MLA_SCHEDULE)
OPS = {signature.name: signature.home.split(".")[-2] for signature in SIGNATURES}  # what a pass answers: the folder


def op_of(spec: Spec) -> Op:
    return cast("Op", import_module(f"{__package__}.{_folder_of(spec)}.op"))


def bench_of(spec: Spec) -> Bench:
    return cast("Bench", import_module(f"{__package__}.{_folder_of(spec)}.bench").BENCH)


def lineages() -> tuple[Lineage, ...]:
    """Of the operations that have a module `lineage`, whose generations are compared."""
    homes = (f"{__package__}.{folder}.lineage" for folder in dict.fromkeys(OPS.values()))
    return tuple(cast("Lineage", import_module(home).LINEAGE) for home in homes if find_spec(home))


def _folder_of(spec: Spec) -> str:
    from flashgen.codegen.families.registry import op_of

    op = op_of(spec)
    if op not in OPS:
        raise UnsupportedError(f"no operation for family {spec.family}, pass {spec.pass_}", where=spec.variant,
                               allowed=", ".join(OPS))
    return OPS[op]
