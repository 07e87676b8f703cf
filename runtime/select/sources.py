"""What users say of where kernels come from: flashgen.load_bundle and flashgen.reload."""
from __future__ import annotations

from pathlib import Path

from flashgen.runtime.select.bundle import Bundle
from flashgen.runtime.select.lookup import registry


def load_bundle(directory: str | Path) -> Bundle:
    """Serve the precompiled kernels of `directory` (written by `flashgen bundle`) from now on, without a compiler.

    Raises BundleError if its manifest is damaged or of an incompatible flashgen.
    """
    return registry.load_bundle(directory)


def reload() -> None:
    """Read spec files anew: what changed in them counts from the next call on, also in compiled graphs.

    Each file is otherwise read once per process, and each relative path is looked up once per working directory.
    """
    registry.reload()
