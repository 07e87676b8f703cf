"""Source: the rendered CUDA text of one kernel and the headers it reaches. No paths, times or versions."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    text: str
    entry: str                            # extern "C" name of the kernel, the plan's variant
    file_name: str                        # "<variant>.<arch>.cu": what compilers and profilers show
    headers: tuple[tuple[str, str], ...]  # (name as written in #include, text)
    arch: str                             # a Target name
    options: tuple[str, ...] = ()         # compiler options this kernel asks for, beside those every kernel gets
