"""Tile classes of masks: never wrong on any box, and exact on tiles of the families that people use."""
from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from expr_strategies import PARAMS, SEQLEN_KV, SEQLEN_Q, texts, values
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgen.codegen.expr.canon import canonical
from flashgen.codegen.expr.evaluate import evaluate
from flashgen.codegen.expr.params import read_params
from flashgen.codegen.expr.parse import parse
from flashgen.codegen.expr.ranges import TileClass, mask_class
from flashgen.codegen.expr.sets import NumberSet
from flashgen.codegen.expr.tree import INT_MAX, INT_MIN, Expr
from flashgen.errors import SpecError


def read(text: str, params: Any = PARAMS) -> Expr:
    return canonical(parse(text, params, "mask"))


def of_points(visible: Any) -> TileClass:
    return TileClass.FULL if visible.all() else TileClass.PARTIAL if visible.any() else TileClass.SKIP


@settings(max_examples=150, deadline=None)
@given(texts("mask", depth=3), st.integers(0, 2**16), st.data())
def test_sound(case: tuple[Any, str], seed: int, data: st.DataObject) -> None:
    """SKIP and FULL are true of every position in the box; other names are given exactly, as a range, or not at all."""
    try:
        tree = read(case[1])
    except SpecError:
        return
    env = values(seed, quarters=bool(seed % 2))
    q_from, q_to = sorted(data.draw(st.tuples(*[st.integers(0, SEQLEN_Q - 1)] * 2)))
    kv_from, kv_to = sorted(data.draw(st.tuples(*[st.integers(0, SEQLEN_KV - 1)] * 2)))
    env |= {"q_pos": env["q_pos"][q_from:q_to + 1], "kv_pos": env["kv_pos"][:, kv_from:kv_to + 1]}
    ranges: dict[str, Any] = {name: (int(env[name].min()), int(env[name].max())) for name in ("q_pos", "kv_pos")}
    rng = random.Random(seed)
    for name in ("head_q", "seqlen_kv", "width", "step", "gain", "cap", "flag"):
        exact, known = rng.random() < 0.6, rng.random() < 0.9
        if known:
            ranges[name] = env[name] if exact or name == "flag" else (env[name] - rng.randint(0, 2), env[name] + 1)
    for name in ("table", "doc", "slope", "bias", "keep"):
        if rng.random() < 0.5:
            ranges[name] = (env[name].min().item(), env[name].max().item())
    found = mask_class(tree, ranges, max_boxes=64)
    if found is not TileClass.PARTIAL:
        for dtype in ("float32", "float64"):
            assert of_points(np.atleast_1d(evaluate(tree, env, np, dtype))) is found, (tree.text, ranges)


FAMILY_PARAMS = read_params({name: {"type": "int"} for name in ("window", "sinks", "prefix", "chunk", "step", "right")})
FAMILIES: dict[str, str] = {
    "full": "True", "causal": "kv_pos <= q_pos", "anti-causal": "kv_pos > q_pos",
    "window": "0 <= q_pos - kv_pos < window", "two-sided": "abs(q_pos - kv_pos) <= window",
    "left and right": "kv_pos >= q_pos - window and kv_pos <= q_pos + right",
    "sinks and window": "kv_pos <= q_pos and (q_pos - kv_pos < window or kv_pos < sinks)",
    "prefix-LM": "kv_pos <= q_pos or kv_pos < prefix",
    "prefix, then window": "kv_pos < prefix or 0 <= q_pos - kv_pos < window",
    "chunked": "q_pos // chunk == kv_pos // chunk",
    "chunked and causal": "kv_pos <= q_pos and q_pos // chunk == kv_pos // chunk",
    "neighbouring chunks": "kv_pos <= q_pos and q_pos // chunk - kv_pos // chunk <= 1",
    "dilated": "kv_pos <= q_pos and (q_pos - kv_pos) % step == 0",
    "dilated by block": "kv_pos <= q_pos and (q_pos // chunk - kv_pos // chunk) % step == 0",
    "strided columns": "kv_pos <= q_pos and (q_pos - kv_pos < window or kv_pos // chunk % step == step - 1)",
    "not within": "not (kv_pos <= q_pos and q_pos - kv_pos < window)",
    "by condition": "kv_pos < sinks if q_pos < prefix else kv_pos <= q_pos",
    "never": "kv_pos <= q_pos and q_pos + 1 <= kv_pos", "always": "kv_pos <= q_pos or kv_pos > q_pos - window",
    "bottom and top": "min(q_pos, prefix) >= kv_pos", "last tokens": "kv_pos >= seqlen_kv - window and kv_pos <= q_pos",
}
TILINGS = [(4, 4, 0), (8, 4, 0), (4, 16, 5), (16, 8, -3), (5, 7, 2)]  # rows, columns, q_pos of the first row


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_exact_on_tiles(family: str, tiling: tuple[int, int, int]) -> None:
    rows, columns, first = tiling
    tree = read(FAMILIES[family], FAMILY_PARAMS)
    checked: Counter[TileClass] = Counter()
    for window, sinks, prefix, chunk, step in [(6, 3, 9, 8, 3), (1, 4, 16, 4, 2), (20, 0, 0, 16, 4), (13, 5, 30, 5, 1)]:
        env = {"window": window, "sinks": sinks, "prefix": prefix, "chunk": chunk, "step": step, "right": 2,
               "seqlen_kv": 48}
        for q, kv in itertools.product(range(first, first + 40, rows), range(0, 48, columns)):
            points = env | {"q_pos": np.arange(q, q + rows)[:, None], "kv_pos": np.arange(kv, kv + columns)[None]}
            found = mask_class(tree, env | {"q_pos": (q, q + rows - 1), "kv_pos": (kv, kv + columns - 1)})
            assert found is of_points(np.atleast_1d(evaluate(tree, points, np))), (env, q, kv)
            checked[found] += 1
    assert set(checked) != {TileClass.PARTIAL}


def test_tile_counts_of_a_large_problem() -> None:
    """8192 positions in tiles of 128, against closed forms."""
    def count(text: str, **env: int) -> tuple[int, int]:
        tree = read(text, FAMILY_PARAMS)
        found = Counter(mask_class(tree, env | {"q_pos": (q, q + 127), "kv_pos": (kv, kv + 127)})
                        for q, kv in itertools.product(range(0, 8192, 512), range(0, 8192, 128)))
        return found[TileClass.FULL], found[TileClass.PARTIAL]

    query_tiles = range(0, 64, 4)
    assert count("kv_pos <= q_pos") == (sum(query_tiles), 16)
    assert count("0 <= q_pos - kv_pos < window", window=1024) == (sum(min(q, 7) for q in query_tiles),
                                                                   16 + sum(q >= 8 for q in query_tiles))
    assert count("q_pos // chunk == kv_pos // chunk", chunk=1024) == (16 * 8, 0)
    assert count("q_pos == kv_pos") == (0, 16)


def test_ranges_of_other_names() -> None:
    """The answer holds for each value of a range: a window that may be anything from 5 to 9."""
    tree = read("0 <= q_pos - kv_pos < window", FAMILY_PARAMS)
    box = {"window": (5, 9)}
    assert mask_class(tree, box | {"q_pos": (30, 31), "kv_pos": (28, 29)}) is TileClass.FULL
    assert mask_class(tree, box | {"q_pos": (30, 31), "kv_pos": (10, 21)}) is TileClass.SKIP
    assert mask_class(tree, box | {"q_pos": (30, 30), "kv_pos": (24, 24)}) is TileClass.PARTIAL
    assert mask_class(tree, {"q_pos": (30, 31), "kv_pos": (32, 40)}) is TileClass.SKIP  # whatever the window is
    assert mask_class(tree, {"q_pos": (30, 31), "kv_pos": (10, 11)}) is TileClass.PARTIAL


@pytest.mark.parametrize(("text", "ranges", "expected"), [
    ("q_pos + width < 0", {"q_pos": (1, 5), "width": INT_MAX}, TileClass.FULL),   # wraps: every sum is negative
    ("q_pos + width < 0", {"q_pos": (0, 5), "width": INT_MAX}, TileClass.PARTIAL),
    ("abs(step) < 0", {"step": INT_MIN}, TileClass.FULL), ("step // -1 == step", {"step": INT_MIN}, TileClass.FULL),
    ("q_pos // width == 0", {"q_pos": (-9, 9), "width": 0}, TileClass.FULL),
    ("q_pos % width == 0", {"q_pos": (-9, 9), "width": 0}, TileClass.FULL),
    ("q_pos * q_pos >= 0", {"q_pos": (-9, 9)}, TileClass.FULL),
    ("doc[q_pos] == doc[kv_pos]", {"q_pos": (0, 3), "kv_pos": (0, 3)}, TileClass.PARTIAL),
    ("doc[q_pos] < 4", {"q_pos": (0, 3), "doc": (0, 3)}, TileClass.FULL),
    ("keep[q_pos, kv_pos] and kv_pos < 0", {"q_pos": (0, 3), "kv_pos": (0, 3)}, TileClass.SKIP),
    ("gain < 1.5", {"gain": (0.0, 1.25)}, TileClass.FULL), ("gain < 1.5", {}, TileClass.PARTIAL),
    ("gain == gain", {}, TileClass.PARTIAL), ("not gain < gain", {}, TileClass.PARTIAL),
    ("float(q_pos) * gain <= 20", {"q_pos": (0, 9), "gain": 2.0}, TileClass.FULL),
    ("tanh(gain) < 2", {"gain": (-9.0, 9.0)}, TileClass.FULL), ("exp(gain) < 0", {"gain": 1.0}, TileClass.SKIP),
    ("flag or q_pos < 4", {"q_pos": (0, 3)}, TileClass.FULL), ("flag", {"flag": True}, TileClass.FULL),
    ("flag == (q_pos < 4)", {"flag": False, "q_pos": (4, 9)}, TileClass.FULL),
])
def test_one_box(text: str, ranges: dict[str, Any], expected: TileClass) -> None:
    assert mask_class(read(text), ranges) is expected


@pytest.mark.parametrize("ranges", [{"q_pos": (3, 2)}, {"q_pos": 1.5}, {"q_pos": "all"}, {"q_pos": (0.0, 1.0)}])
def test_refused_ranges(ranges: Any) -> None:
    with pytest.raises(SpecError, match="q_pos is"):
        mask_class(read("kv_pos <= q_pos"), ranges)


def test_no_mask() -> None:
    with pytest.raises(SpecError, match="is float"):
        mask_class(parse("score", {}, "score"), {})


@given(st.lists(st.tuples(st.integers(-9, 9), st.integers(0, 4)), max_size=4), st.integers(-9, 9), st.integers(0, 5))
def test_number_sets(parts: list[tuple[int, int]], low: int, width: int) -> None:
    numbers, members = NumberSet(), set()
    for start, length in parts:
        part = NumberSet.from_(start).both(NumberSet.up_to(start + length))
        numbers = numbers.complement().both(part.complement()).complement()
        members |= set(range(start, start + length + 1))
    inside = [number for number in range(-12, 16) if numbers.meets(number, number)]
    assert inside == sorted(members)
    assert numbers.meets(low, low + width) == bool(members & set(range(low, low + width + 1)))
    assert set(numbers.turns()) == {n for n in range(-12, 17) if (n in members) != (n - 1 in members)}
