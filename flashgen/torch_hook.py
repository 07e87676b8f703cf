"""Registers the torch ops as soon as both flashgen and torch are imported, in whichever order.

`import flashgen` must not import torch. Where torch comes later, a finder on sys.meta_path lets the usual finders look
for it and has the ops registered at the end of its import. It then leaves sys.meta_path.
"""
from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from flashgen.log import logger


def register() -> None:
    import flashgen.runtime.ops.torch_ops  # noqa: F401


class _AfterTorch:
    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None,
                  ) -> ModuleSpec | None:
        if name != "torch":
            return None
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is None or spec.loader is None:  # not installed, or a folder called torch
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)  # an import that fails may be tried again: the finder stays
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                try:
                    register()
                except Exception as error:  # a torch that lacks what the ops need is not made unusable by flashgen
                    logger().warning("flashgen's ops are not registered with this torch: %s: %s", type(error).__name__,
                                     error)

        loader.exec_module = exec_module
        return spec


def watch() -> None:
    """Called once, by `import flashgen`."""
    if sys.modules.get("torch") is not None:
        register()
    else:
        sys.meta_path.insert(0, _AfterTorch())
