"""Whether strided tensors share an element: exact, from sizes, strides and addresses. No torch."""
from __future__ import annotations

from collections.abc import Iterable, Sequence

MAX_STEPS = 4096  # of one search; nested layouts take a few. A search that is not done by then counts as a hit.

Range = tuple[int, int, int]  # (stride, least index, largest index)


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last, 0 of an empty tensor."""
    return 0 if 0 in shape else 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def overlaps_itself(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two indices lead to one element: a difference of indices, not all 0, whose offset is 0."""
    if 0 in shape:
        return False
    dims = sorted(((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1), reverse=True)
    return any(_reaches(0, [(stride, 1, size - 1), *((s, 1 - n, n - 1) for s, n in dims[place + 1:])])
               for place, (stride, size) in enumerate(dims))


def overlap(shape: Sequence[int], strides: Sequence[int], other_shape: Sequence[int], other_strides: Sequence[int],
            distance: int) -> bool:
    """Whether two tensors share an element; the second begins `distance` elements after the first."""
    if 0 in shape or 0 in other_shape:
        return False
    found: dict[int, tuple[int, int]] = {}
    for low, high, stride in [*((0, size - 1, s) for size, s in zip(shape, strides, strict=True)),
                              *((1 - size, 0, s) for size, s in zip(other_shape, other_strides, strict=True))]:
        before = found.get(stride, (0, 0))
        found[stride] = (before[0] + low, before[1] + high)
    return _reaches(distance, sorted(((s, low, high) for s, (low, high) in found.items()), reverse=True))


def _reaches(total: int, ranges: Iterable[Range]) -> bool:
    """Whether `total` is a sum of stride * index over all ranges, whose strides fall."""
    ordered = list(ranges)
    low, high = [0], [0]  # of what the ranges from a place on can add
    for stride, least, largest in reversed(ordered):
        low.append(low[-1] + stride * least)
        high.append(high[-1] + stride * largest)
    low.reverse()
    high.reverse()
    steps = MAX_STEPS

    def search(left: int, place: int) -> bool:
        nonlocal steps
        steps -= 1
        if steps < 0:
            return True
        if not low[place] <= left <= high[place]:
            return False
        if place == len(ordered) or ordered[place][0] == 0:
            return left == 0
        stride, least, largest = ordered[place]
        first = max(least, -((high[place + 1] - left) // stride))
        last = min(largest, (left - low[place + 1]) // stride)
        return any(search(left - stride * index, place + 1) for index in range(first, last + 1))

    return search(total, 0)
