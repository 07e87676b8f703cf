"""Element types: one row per dtype, the only place that knows its names in YAML, CUDA and torch."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DType:
    name: str          # in YAML and in variant names
    torch_name: str    # attribute of the torch module
    bytes: int
    element: str       # type tag in the generated CUDA (prelude.cuh)


DTYPES: dict[str, DType] = {
    d.name: d
    for d in (
        DType("bf16", "bfloat16", 2, "bf16"),
        DType("fp16", "float16", 2, "fp16"),
    )
}
