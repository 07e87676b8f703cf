"""flashgen: attention kernels generated from YAML specs, compiled by NVRTC, looked up at run time from PyTorch.

`import flashgen` brings in neither torch nor CUDA; each name below loads what it needs when it is first used. Only the
torch ops are registered at once, or as soon as torch is imported, so that saved programs find them by name.
"""
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from flashgen import errors, torch_hook

__version__ = "0.1.0"

if TYPE_CHECKING:
    from flashgen.codegen.explain import explain
    from flashgen.codegen.spec import Spec, load_specs
    from flashgen.runtime.block_map import block_map, unpack_bits
    from flashgen.runtime.lookup import load_bundle, reload
    from flashgen.runtime.mla import MlaSchedule, mla_decode, mla_schedule
    from flashgen.runtime.ops import attention
    from flashgen.runtime.variant import variant

__all__ = ["MlaSchedule", "Spec", "attention", "block_map", "errors", "explain", "load_bundle", "load_specs",
           "mla_decode", "mla_schedule", "reload", "unpack_bits", "variant"]

_HOMES = {
    "MlaSchedule": "flashgen.runtime.mla",
    "Spec": "flashgen.codegen.spec",
    "attention": "flashgen.runtime.ops",
    "block_map": "flashgen.runtime.block_map",
    "explain": "flashgen.codegen.explain",
    "load_bundle": "flashgen.runtime.lookup",
    "load_specs": "flashgen.codegen.spec",
    "mla_decode": "flashgen.runtime.mla",
    "mla_schedule": "flashgen.runtime.mla",
    "reload": "flashgen.runtime.lookup",
    "unpack_bits": "flashgen.runtime.block_map",
    "variant": "flashgen.runtime.variant",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'flashgen' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value  # the next use costs a dictionary look-up
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


torch_hook.watch()
