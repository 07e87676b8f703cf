"""Every error that flashgen raises on purpose, in one shape.

An error answers five questions: where (file:line:column or the argument), what was asked, what is allowed,
the nearest thing that works, and what to run next. Checks build these from the same tables that hold the rules,
so that a message cannot drift from its rule.
"""
from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, ClassVar


class FlashgenError(Exception):
    """Base of all errors. `exit_code` is what the command line returns for it."""

    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, *, where: str = "", allowed: str = "", nearest: str = "", next: str = "",
                 details: str = "") -> None:
        self.what, self.where, self.allowed, self.nearest, self.next = what, where, allowed, nearest, next
        self.details = details
        super().__init__(str(self))

    def __str__(self) -> str:
        lines = [f"{self.where}: {self.what}" if self.where else self.what]
        for label, text in (("allowed", self.allowed), ("nearest", self.nearest), ("next", self.next)):
            if text:
                lines.append(f"  {label}: {text}")
        if self.details:
            lines.append(self.details)
        return "\n".join(lines).encode(errors="backslashreplace").decode()  # a path may hold half a surrogate pair

    def __reduce__(self) -> tuple[Any, ...]:  # keyword-only arguments do not survive the default pickling
        return _rebuild, (type(self), self.to_json())

    def to_json(self) -> dict[str, str]:
        keys = ("what", "where", "allowed", "nearest", "next", "details")
        return {key: getattr(self, key) for key in keys}


def _rebuild(cls: type[FlashgenError], fields: dict[str, str]) -> FlashgenError:
    return cls(**fields)


class SpecError(FlashgenError):
    """A YAML spec says something that no kernel family understands."""

    exit_code = 2


class PlanError(FlashgenError):
    """A valid spec cannot be lowered to a plan that fits its target."""

    exit_code = 3


class TemplateError(FlashgenError):
    """A template breaks the template rules or does not render."""

    exit_code = 4


class CompileError(FlashgenError):
    """NVRTC refused a kernel, or produced one whose resources the plan does not allow."""

    exit_code = 5


class UnsupportedError(FlashgenError, ValueError):
    """A call asks for something no available kernel does (shapes, dtypes, flags, missing precompiled variant)."""

    exit_code = 6


class VerifyError(FlashgenError, AssertionError):
    """A kernel's result differs from the fp64 reference by more than the contract allows."""

    exit_code = 7


class EnvironmentError_(FlashgenError, RuntimeError):
    """The machine lacks something: a driver, a GPU, NVRTC, torch, a writable directory."""

    exit_code = 8


class DriverError(EnvironmentError_):
    """The CUDA driver returned an error code."""


class BundleError(FlashgenError):
    """A bundle directory is damaged or was made by an incompatible flashgen."""

    exit_code = 9


def nearest_word(text: object, words: Iterable[str], cutoff: float = 0.6) -> str:
    """The most similar word, or an empty text where none is similar."""
    return next(iter(difflib.get_close_matches(str(text)[:64], list(words), n=1, cutoff=cutoff)), "")


def of_os(error: OSError) -> EnvironmentError_:
    """A refusal by the operating system, in the words of all other errors."""
    return EnvironmentError_(error.strerror or str(error) or type(error).__name__,
                             where=", ".join(str(name) for name in (error.filename, error.filename2) if name),
                             next="flashgen doctor")


def together(problems: list[SpecError]) -> SpecError:
    """One error for all: the first, with the others listed below it."""
    first, *others = problems
    if not others:
        return first
    details = "\n".join([f"and {len(others)} more:", *map(str, others)])
    return SpecError(first.what, where=first.where, allowed=first.allowed, nearest=first.nearest, next=first.next,
                     details=details)
