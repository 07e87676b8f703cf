"""Tensor maps: how TMA of compute capability 9.0 and later sees q, k, v and out. No torch.

A map is [head_dim, rows, heads, batch] with the contiguous dimension first (varlen: batch 1), byte strides of all but
that one, and the box of one copy. It holds the tensor's address, so it is encoded where the launch's parameters lie and
gets a new address when a tensor moves.
"""
from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flashgen.codegen.dtype import DTYPES
from flashgen.codegen.plan import CTYPES, Plan, TensorMap
from flashgen.runtime.launch.driver import api, check

MAP_BYTES, MAP_ALIGN = CTYPES["tensor_map"].bytes, CTYPES["tensor_map"].align
STRIDE_LIMIT_BYTES = 2**40
ELEMENTS = {"bf16": "BFLOAT16", "fp16": "FLOAT16"}  # as CUtensorMapDataType has them


@dataclass(frozen=True)
class MapShape:
    """The arguments of cuTensorMapEncodeTiled but the address; lists begin with the contiguous dimension."""

    name: str                # of the parameter
    tensor: str              # the pointer parameter whose memory it describes
    dtype: str               # key of DTYPES
    dims: tuple[int, ...]
    strides: tuple[int, ...]  # bytes, of all dimensions but the first
    box: tuple[int, ...]
    swizzle_bytes: int

    @property
    def element_bytes(self) -> int:
        return DTYPES[self.dtype].bytes


def fits_maps(shape: Sequence[int], strides: Sequence[int], element_bytes: int) -> bool:
    """Whether a tensor map can describe a tensor [..., head_dim] whose rows are 16-byte aligned. `strides` in elements.

    Not one whose rows, heads or sequences overlap (an expanded tensor has stride 0), nor one with a stride of
    STRIDE_LIMIT_BYTES.
    """
    if 0 in shape:
        return True
    row_bytes = shape[-1] * element_bytes
    return all(size == 1 or row_bytes <= stride * element_bytes < STRIDE_LIMIT_BYTES
               for size, stride in zip(shape[:-1], strides[:-1], strict=True))


def map_shapes(plan: Plan, values: Mapping[str, Any]) -> tuple[MapShape, ...]:
    """What each of the plan's maps describes in a call with these parameter values."""
    return tuple(_map_shape(row, dict(plan.spec), values) for row in plan.tensor_maps)


def _map_shape(row: TensorMap, spec: Mapping[str, Any], values: Mapping[str, Any]) -> MapShape:
    if row.box_panels:
        return _panel_map_shape(row, spec, values)
    query, varlen = row.tensor in ("q", "out", "dout"), spec["kv_layout"] == "varlen"
    element_bytes = DTYPES[spec["dtype"]].bytes
    rows = values["seqlen_q" if query else "seqlen_kv"]
    heads = values["num_heads_q"] // (1 if query else values["heads_per_kv_head"])
    columns = spec["head_dim_v" if row.tensor in ("v", "out", "dout", "dv") else "head_dim_qk"]
    dims: tuple[int, ...] = (columns, rows, heads, 1 if varlen else values["batch"])

    def stride(size: int, axis: str) -> int:
        if size == 1:  # means nothing, and may be anything: what is legal will do
            return dims[0] * element_bytes
        return int(values[f"{row.tensor}_{axis}_stride"]) * element_bytes

    strides: tuple[int, ...] = (stride(dims[1], "row"), stride(dims[2], "head"), stride(dims[3], "batch"))
    box: tuple[int, ...] = (row.box_cols, row.box_rows, 1, 1)
    if row.packed:
        group = values["heads_per_kv_head"]
        dims = (dims[0], group, dims[1], dims[2] // group, dims[3])
        strides = (strides[1], strides[0], group * strides[1], strides[2])
        box = (row.box_cols, group, row.box_rows // group, 1, 1)
    return MapShape(row.name, row.tensor, spec["dtype"], dims, strides, box, row.swizzle_bytes)


def _panel_map_shape(row: TensorMap, spec: Mapping[str, Any], values: Mapping[str, Any]) -> MapShape:
    element_bytes = DTYPES[spec["dtype"]].bytes
    rows, outer = values[f"{row.tensor}_rows"], values[f"{row.tensor}_outer"]
    dims = (row.box_cols, rows, spec["head_dim_qk"] // row.box_cols, outer)
    row_bytes = spec["head_dim_qk"] * element_bytes
    return MapShape(row.name, row.tensor, spec["dtype"], dims,
                    (values[f"{row.tensor}_row_stride"] * element_bytes if rows > 1 else row_bytes,
                     row.box_cols * element_bytes,
                     values[f"{row.tensor}_outer_stride"] * element_bytes if outer > 1 else rows * row_bytes),
                    (row.box_cols, row.box_rows, row.box_panels, 1), row.swizzle_bytes)


def encode(shape: MapShape, address: int, host_address: int) -> Any:
    """Encode a map of the tensor at a device address into the MAP_BYTES at `host_address`, a multiple of MAP_ALIGN.

    Returns a CUtensorMap over those bytes, for cuTensorMapReplaceAddress; they must outlive it. DriverError if the
    driver refuses.
    """
    cuda = api()
    swizzle = f"{shape.swizzle_bytes}B" if shape.swizzle_bytes else "NONE"
    encoded = check(cuda.cuTensorMapEncodeTiled(
        getattr(cuda.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{ELEMENTS[shape.dtype]}"), len(shape.dims), address,
        [cuda.cuuint64_t(dim) for dim in shape.dims], [cuda.cuuint64_t(stride) for stride in shape.strides],
        [cuda.cuuint32_t(size) for size in shape.box], [cuda.cuuint32_t(1)] * len(shape.dims),
        cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(cuda.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{swizzle}"),
        cuda.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE), f"tensor map {shape}")
    ctypes.memmove(host_address, encoded.getPtr(), MAP_BYTES)
    return cuda.CUtensorMap(_ptr=host_address)
