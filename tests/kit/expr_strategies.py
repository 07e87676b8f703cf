"""Random well-typed score and mask expressions as text, and values for all that they may name.

The text is drawn with a Random, which Hypothesis supplies (and shrinks) in properties, and a seed in batches.
"""
from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st

from flashgen.codegen.expr.params import read_params

DECLARED: dict[str, Any] = {
    "width": {"type": "int", "default": 5}, "step": {"type": "int", "default": -3}, "gain": {"type": "float"},
    "cap": {"type": "float", "default": 2.5}, "flag": {"type": "bool", "default": True},
    "slope": {"type": "tensor", "dtype": "float32", "shape": ["num_heads_q"]},
    "table": {"type": "tensor", "dtype": "int32", "shape": [7]},
    "bias": {"type": "tensor", "dtype": "float32", "shape": ["num_heads_q", 9]},
    "doc": {"type": "tensor", "dtype": "int32", "shape": ["total_kv"]},
    "keep": {"type": "tensor", "dtype": "bool", "shape": ["seqlen_q", "seqlen_kv"]},
}
PARAMS = read_params(DECLARED)
SEQLEN_Q, SEQLEN_KV, HEADS, KV_BEGIN = 12, 15, 4, 3


class Writer:
    """Draws text. Without `special`, floats are sums and products of small multiples of 0.25: exact in float64."""

    def __init__(self, rng: random.Random, score: bool, special: bool = True) -> None:
        self.rng, self.special = rng, special
        self.float_leaves = ["gain", "cap", "slope[head_q]", *(["score"] * 3 if score else [])]

    def of(self, kind: str, depth: int) -> str:
        writers: dict[str, Callable[[int], str]] = {"int": self.int_, "float": self.float_, "bool": self.bool_}
        return writers[kind](depth)

    def pick(self, *texts: str) -> str:
        return self.rng.choice(texts)

    def select(self, kind: str, depth: int) -> str:
        return f"({self.of(kind, depth)} if {self.bool_(depth)} else {self.of(kind, depth)})"

    def int_(self, depth: int) -> str:
        if depth <= 0 or self.rng.random() < 0.15:
            return self.pick("q_pos", "kv_pos", "q_pos", "kv_pos", "head_q", "seqlen_kv", "q_index", "q_first", "width",
                             "step", str(self.rng.randint(0, 9)),
                             str(self.rng.choice([16, 100, 2147483647, -2147483648])))
        a, b = self.int_(depth - 1), self.int_(depth - 1)
        divisor = self.pick("2", "3", "4", "-5", "width", "step", f"({b} + 0)" if self.rng.random() < 0.5 else "q_pos")
        return self.pick(f"({a} + {b})", f"({a} - {b})", f"({a} * {b})", f"({a} // {divisor})", f"({a} % {divisor})",
                         f"min({a}, {b})", f"max({a}, {b}, 3)", f"abs({a})", f"-{a}", f"table[{a}]", f"doc[{a}]",
                         self.select("int", depth - 1))

    def float_(self, depth: int) -> str:
        if depth <= 0 or self.rng.random() < 0.15:
            return self.pick(*self.float_leaves, self.pick("0.0", "0.25", "1.0", "2.0", "3.5", "-1.0", "-0.5"))
        a, b = self.float_(depth - 1), self.float_(depth - 1)
        if self.special and self.rng.random() < 0.4:
            return self.pick(f"({a} / {b})", f"({a} / 4)", f"exp({a})", f"log({a})", f"tanh({a})", f"sigmoid({a})",
                             f"exp(-abs({a}))", "1e-3", "30.1")
        return self.pick(f"({a} + {b})", f"({a} - {b})", f"({a} * {b})", f"min({a}, {b})", f"max({a}, {b}, 0.5)",
                         f"abs({a})", f"-{a}", f"float({self.int_(depth - 2)})", f"({self.int_(depth - 2)} + {a})",
                         f"({a} * {self.rng.randint(-2, 3)})", f"bias[head_q, {self.int_(depth - 2)}]",
                         self.select("float", depth - 1))

    def bool_(self, depth: int) -> str:
        if depth <= 0:
            return self.pick("flag", "True", "False", "(kv_pos <= q_pos)", "(q_pos - kv_pos < width)", "(kv_pos < 4)",
                             "keep[q_pos, kv_pos]")
        kind = self.pick("int", "int", "float")
        a, b, c = (self.of(kind, depth - 1) for _ in range(3))
        p, q = self.bool_(depth - 1), self.bool_(depth - 1)
        sign, other = self.pick("<", "<=", ">", ">=", "==", "!="), self.pick("<", "<=", "==")
        return self.pick(f"({a} {sign} {b})", f"({a} {sign} {b})", f"({a} {other} {b} {other} {c})", f"({p} and {q})",
                         f"({p} or {q})", f"({p} or {q} or {a} < {b})", f"(not {p})", f"({p} == {q})", f"({p} != {q})",
                         self.select("bool", depth - 1))


def write(rng: random.Random, kind: str, depth: int, special: bool = True) -> str:
    writer = Writer(rng, kind == "score", special)
    return writer.float_(depth) if kind == "score" else writer.bool_(depth)


@st.composite
def texts(draw: st.DrawFn, kind: str = "", depth: int = 3, special: bool = True) -> tuple[str, str]:
    """(kind, text)"""
    kind = kind or draw(st.sampled_from(["score", "mask"]))
    return kind, write(draw(st.randoms(use_true_random=False)), kind, depth, special)


def values(seed: int, quarters: bool = False) -> dict[str, Any]:
    """A value for each name: positions as a column and a row, scores as a matrix; multiples of 0.25 if `quarters`."""
    rng = np.random.default_rng(seed)

    def floats(*shape: int) -> Any:
        return (rng.integers(-16, 17, shape) / 4 if quarters else rng.normal(0, 3, shape)).astype(np.float32)

    offset = SEQLEN_KV - SEQLEN_Q
    return {
        "q_pos": np.arange(SEQLEN_Q, dtype=np.int32)[:, None] + offset,
        "kv_pos": np.arange(SEQLEN_KV, dtype=np.int32)[None, :], "score": floats(SEQLEN_Q, SEQLEN_KV),
        "batch": 1, "head_q": int(rng.integers(HEADS)), "head_kv": 0, "seqlen_q": SEQLEN_Q, "seqlen_kv": SEQLEN_KV,
        "q_first": offset, "kv_begin": KV_BEGIN, "width": int(rng.integers(-1, 9)), "step": int(rng.integers(-4, 4)),
        "gain": float(floats(1)[0]), "cap": float(floats(1)[0]), "flag": bool(rng.integers(2)), "slope": floats(HEADS),
        "table": rng.integers(-9, 20, 7).astype(np.int32), "bias": floats(HEADS, 9),
        "doc": np.sort(rng.integers(0, 4, KV_BEGIN + SEQLEN_KV + 2)).astype(np.int32),
        "keep": rng.integers(0, 2, (SEQLEN_Q, SEQLEN_KV)).astype(bool),
    }
