"""The form of a rule between the fields of a Spec, and of the error where one is broken. Families bring their own."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from flashgen.codegen.spec.show import show
from flashgen.errors import SpecError

EXTRA = ("mask", "params", "align", "sink", "normalize", "dropout")  # absent from Spec.fields() at their defaults


@dataclass(frozen=True)
class Rule:
    """`about` is what specs/README.md prints; the `where` of the error names the field to point at."""

    about: str
    check: Callable[[Any], SpecError | None]


class Only(NamedTuple):
    """The values that a family takes of a field which can hold more, and why no others."""

    field: str
    values: Sequence[Any]
    why: str = ""  # where it is empty, the error names the families that take the value


def refused(name: str, value: object, beside: str, allowed: str, nearest: str, match: str) -> SpecError:
    """`match`: the other half of an entry of exclude."""
    return SpecError(f"{name} is {show(value)} with {beside}", where=f"Spec.{name}", allowed=allowed, nearest=nearest,
                     next=f"when both are lists, add `- {{{match}, {name}: {show(value)}}}` to exclude")


def shown(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def listed(values: Sequence[Any]) -> str:
    if isinstance(values, range):
        return f"multiples of {values.step} from {values[0]} to {values[-1]}"
    return ", ".join(map(shown, values))


def nearest_number(numbers: Iterable[int], given: int) -> str:
    return str(min(numbers, key=lambda number: abs(number - given)))


_PLAIN = {"score": "none", "mask": "none", "sink": "none", "normalize": "softmax"}


def changed(spec: Any) -> str | None:
    """A field that makes it another attention than softmax's of plain scores."""
    return next((name for name, plain in _PLAIN.items() if getattr(spec, name) != plain), None)
