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
    from flashgen.codegen.explain.explain import explain
    from flashgen.codegen.spec.spec import Spec, load_specs
    from flashgen.runtime.ops.attention.block_map import block_map, unpack_bits
    from flashgen.runtime.ops.attention.call import attention
    from flashgen.runtime.ops.attention.dropout import dropout_mask
    from flashgen.runtime.ops.attention_backward.call import attention_backward
    from flashgen.runtime.ops.mla_decode.call import mla_decode
    from flashgen.runtime.ops.mla_decode.schedule import mla_schedule
    from flashgen.runtime.ops.mla_decode.signature import MlaSchedule
    from flashgen.runtime.select.lookup import load_bundle, reload
    from flashgen.runtime.select.variant import variant

__all__ = ["MlaSchedule", "Spec", "attention", "attention_backward", "block_map", "dropout_mask", "errors", "explain",
           "load_bundle", "load_specs", "mla_decode", "mla_schedule", "reload", "unpack_bits", "variant"]

_HOMES = {
    "MlaSchedule": "flashgen.runtime.ops.mla_decode.signature",
    "Spec": "flashgen.codegen.spec.spec",
    "attention": "flashgen.runtime.ops.attention.call",
    "attention_backward": "flashgen.runtime.ops.attention_backward.call",
    "block_map": "flashgen.runtime.ops.attention.block_map",
    "dropout_mask": "flashgen.runtime.ops.attention.dropout",
    "explain": "flashgen.codegen.explain.explain",
    "load_bundle": "flashgen.runtime.select.lookup",
    "load_specs": "flashgen.codegen.spec.spec",
    "mla_decode": "flashgen.runtime.ops.mla_decode.call",
    "mla_schedule": "flashgen.runtime.ops.mla_decode.schedule",
    "reload": "flashgen.runtime.select.lookup",
    "unpack_bits": "flashgen.runtime.ops.attention.block_map",
    "variant": "flashgen.runtime.select.variant",
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
