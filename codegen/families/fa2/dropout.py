"""What `dropout` of a spec adds to the plans of fa2, forward and backward. Nothing for specs without."""
from __future__ import annotations

from typing import TYPE_CHECKING

from flashgen.codegen.plan import Param

if TYPE_CHECKING:
    from flashgen.codegen.spec.spec import Spec

# Of a thread: tiles are those of kernels without dropout, some of which use all 255 registers. With the newest NVRTC,
# one kernel of all targets and masks spills, 8 bytes. Its other versions may differ a little.
SPILL_BYTES = 64


def allowed_spill_bytes(spec: Spec) -> int:
    return SPILL_BYTES if spec.dropout else 0


def slots_of(spec: Spec) -> tuple[tuple[str, str], ...]:
    return (("first_row", spec.kv_layout), ("dropout", "philox")) if spec.dropout else ()


def flags_of(spec: Spec) -> tuple[tuple[str, bool], ...]:
    return (("dropout", True),) if spec.dropout else ()


def pointer_params(spec: Spec) -> tuple[Param, ...]:
    return (Param("dropout_seed", "i64_ptr", "[2]: a seed, and an offset of 32 bits"),) if spec.dropout else ()


def scalar_params(spec: Spec) -> tuple[Param, ...]:
    return (Param("keep_last", "i32", "the last of the 16-bit numbers that keep a weight"),
            Param("keep_scale", "f32", "of kept weights: 2^16 / (keep_last + 1)")) if spec.dropout else ()
