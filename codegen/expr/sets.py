"""Sets of whole numbers made of a few intervals, for expr_range."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

_INFINITY = 1 << 80  # beyond any difference or product of 32-bit numbers that is looked at


@dataclass(frozen=True)
class NumberSet:
    """Intervals, inclusive, in ascending order, with a gap of one number at least between neighbours."""

    parts: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def at(number: int) -> NumberSet:
        return NumberSet(((number, number),))

    @staticmethod
    def up_to(number: int) -> NumberSet:
        return NumberSet(((-_INFINITY, number),))

    @staticmethod
    def from_(number: int) -> NumberSet:
        return NumberSet(((number, _INFINITY),))

    def complement(self) -> NumberSet:
        result, begin = [], -_INFINITY
        for low, high in self.parts:
            if begin < low:
                result.append((begin, low - 1))
            begin = high + 1
        if begin <= _INFINITY:
            result.append((begin, _INFINITY))
        return NumberSet(tuple(result))

    def both(self, other: NumberSet) -> NumberSet:
        """The intersection."""
        pairs = [(max(a, c), min(b, d)) for a, b in self.parts for c, d in other.parts]
        return NumberSet(tuple(sorted((low, high) for low, high in pairs if low <= high)))

    def meets(self, low: int, high: int) -> bool:
        """Whether a number from low to high is in the set."""
        return any(a <= high and low <= b for a, b in self.parts)

    def turns(self) -> Iterator[int]:
        """The numbers n for which one of n - 1 and n is in the set."""
        for low, high in self.parts:
            if low > -_INFINITY:
                yield low
            if high < _INFINITY:
                yield high + 1
