"""What flashgen.mla_decode and flashgen.mla_schedule take. Imports nothing, as ops/signature.py says."""
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, NamedTuple

from flashgen.runtime.ops.signature import Arg, Option, Options, Shape, Signature, Tensors, inverse_root

if TYPE_CHECKING:
    from torch import Tensor

HEAD_DIM_V = 512
_SCHEDULE_HOME = "flashgen.runtime.ops.mla_decode.schedule"


class MlaSchedule(NamedTuple):
    """Which block of a decode does what, for one set of lengths; for every layer and call that has them."""

    rows: Tensor  # int32, on the device
    batch: int
    num_heads_q: int
    seqlen_q: int


def _shapes(tensors: Tensors, options: Options) -> tuple[Shape, Shape]:
    q = tensors[0]
    return (*q.shape[:-1], HEAD_DIM_V), (q.shape[0], q.shape[2], q.shape[1])


def _schedule_shapes(tensors: Tensors, options: Options) -> tuple[Shape, ...]:
    """Records of a schedule are for the blocks of a kernel on a device."""
    shape: Shape = importlib.import_module(_SCHEDULE_HOME).rows_shape(tensors[0], *options)
    return shape,


MLA_DECODE = Signature(
    "mla_decode", "flashgen.runtime.ops.mla_decode.call",
    (Arg("q", rows=True), Arg("kv_cache", "kv", rows=True), Arg("seqlens_kv", "seqlens"),
     Arg("page_table", optional=True), Arg("sink", optional=True), Arg("schedule", optional=True, device_made=True)),
    (Option("causal", "bool"), Option("softmax_scale", "float", default=inverse_root),
     Option("lse_counts_sink", "bool"), Option("spec", "str")), _shapes)
MLA_SCHEDULE = Signature(
    "mla_schedule", _SCHEDULE_HOME, (Arg("seqlens_kv", "seqlens"),),
    (Option("num_heads_q", "int"), Option("seqlen_q", "int")), _schedule_shapes, results=("schedule",), has_lse=False)
