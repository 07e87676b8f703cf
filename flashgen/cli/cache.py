"""`flashgen cache`: ls, prune, clear."""
from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashgen.cli.common import Output, Table, command
from flashgen.errors import EnvironmentError_

if TYPE_CHECKING:
    from flashgen.runtime.compile.cache import Cache, CacheItem

MB = 10**6
DAY_S = 86400.0


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, rich_markup_mode=None,
                        help="Show and trim the cache of compiled kernels and of the emulator's objects.")
    command(group, ls)
    command(group, prune)
    command(group, clear)
    app.add_typer(group, name="cache")


def ls() -> Output:
    """List the cached kernels, the least recently used first, and count the emulator's objects."""
    cache = _cache()
    items, objects, now = cache.ls(), cache.emulator_objects(), time.time()
    rows = [(item.key[:12], item.variant, item.arch, item.bytes, f"{max(0.0, now - item.used) / DAY_S:.1f}")
            for item in items]
    table: list[str | Table] = [Table(("key", "variant", "arch", ">bytes", ">days unused"), rows)] if rows else []
    return Output({**_data(cache, items), "emulator": _count(objects)},
                  [*table, *_emulator_line(objects, ""), _summary(cache, items, "")])


def prune(max_mb: Annotated[float | None, typer.Option("--max-mb", min=0, metavar="MB", help=(
              "Delete the least recently used until the rest takes no more than this."))] = None,
          max_days: Annotated[float | None, typer.Option("--max-days", min=0, metavar="DAYS", help=(
              "Delete what has not been used for this long."))] = None) -> Output:
    """Delete cached kernels that are old or too many, and what processes that died left behind.

    The emulator's objects stay: `clear` deletes them.
    """
    cache = _cache()
    removed = cache.prune(max_bytes=None if max_mb is None else int(min(max_mb * MB, sys.maxsize)),
                          max_age_s=None if max_days is None else max_days * DAY_S)
    return Output(_data(cache, removed), [_summary(cache, removed, "deleted ")])


def clear() -> Output:
    """Delete every cached kernel and every object of the emulator. Other files in the folder stay."""
    cache = _cache()
    before = cache.emulator_objects()
    removed = cache.clear()
    left = cache.emulator_objects()
    gone = {path: size for path, size in before.items() if path not in left}
    return Output({**_data(cache, removed), "emulator": _count(gone)},
                  [*_emulator_line(gone, "deleted "), _summary(cache, removed, "deleted ")])


def _cache() -> Cache:
    from flashgen.runtime.compile.cache import Cache, default_directory, directory_trouble

    trouble = directory_trouble(default_directory())
    if trouble is not None:
        raise EnvironmentError_(trouble, where="the cache directory", next="FLASHGEN_CACHE_DIR names another one")
    return Cache()


def _data(cache: Cache, items: Sequence[CacheItem]) -> dict[str, Any]:
    return {"cache": str(cache.directory), "bytes": sum(item.bytes for item in items),
            "items": [{"key": item.key, "path": str(item.path), "variant": item.variant, "arch": item.arch,
                       "bytes": item.bytes, "used": item.used} for item in items]}


def _count(objects: Mapping[Path, int]) -> dict[str, int]:
    return {"objects": len(objects), "bytes": sum(objects.values())}


def _emulator_line(objects: Mapping[Path, int], what: str) -> list[str]:
    """Nothing for those who never ran the emulator."""
    return [f"{what}{len(objects)} emulator objects, {sum(objects.values()) / MB:.1f} MB"] if objects else []


def _summary(cache: Cache, items: Sequence[CacheItem], what: str) -> str:
    return f"{what}{len(items)} kernels, {sum(item.bytes for item in items) / MB:.1f} MB; in {cache.directory}"
