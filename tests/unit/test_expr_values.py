"""The values of expressions: canonical form, numpy, torch, CUDA text compiled for the host, parts, derivatives."""
from __future__ import annotations

import ctypes
import random
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from expr_strategies import PARAMS, SEQLEN_KV, SEQLEN_Q, texts, values, write
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgen.codegen.expr.canon import canonical
from flashgen.codegen.expr.cuda import CUDA_NAMES, hoist, to_cuda
from flashgen.codegen.expr.evaluate import evaluate
from flashgen.codegen.expr.grad import derivative, tensor_derivative
from flashgen.codegen.expr.parse import parse
from flashgen.codegen.expr.tree import Expr, Name, Op, TensorParam, names_of, walk
from flashgen.codegen.render import TEMPLATES
from flashgen.errors import SpecError

MASK = "mask"


def read(text: str, kind: Any = "score") -> Expr:
    return parse(text, PARAMS, kind)


def drawn(rng: random.Random, kind: str, count: int, depth: int = 3, special: bool = True) -> list[Expr]:
    """Canonical trees; texts that are refused (an index or a size out of bounds) are drawn again."""
    trees: list[Expr] = []
    while len(trees) < count:
        try:
            trees.append(canonical(read(write(rng, kind, depth, special), kind)))
        except SpecError as error:
            assert any(word in error.what for word in ("too large", "outside", "zero"))
    return trees


@settings(max_examples=100, deadline=None)
@given(texts(depth=3, special=False), st.integers(0, 2**16))
def test_canonical_keeps_values(case: tuple[Any, str], seed: int) -> None:
    """Exactly, where sums and products are exact; with NaN and infinite scores too."""
    kind, text = case
    try:
        tree = read(text, kind)
    except SpecError:
        return
    env = values(seed, quarters=True)
    nodes = [np.max(np.abs(evaluate(node, env, np, "float64"))) for node in walk(tree) if node.type == "float"]
    if all(size < 2**30 for size in nodes):  # at most 11 factors of two binary places: 53 bits hold the rest
        expected = evaluate(tree, env, np, "float64")  # of a shape that holds names which the canonical tree drops
        got = np.broadcast_to(evaluate(canonical(tree), env, np, "float64"), expected.shape)
        np.testing.assert_array_equal(got, expected)


@settings(max_examples=60, deadline=None)
@given(texts(depth=3), st.integers(0, 2**16))
def test_torch_agrees_with_numpy(case: tuple[Any, str], seed: int) -> None:
    kind, text = case
    try:
        tree = canonical(read(text, kind))
    except SpecError:
        return
    env = values(seed)
    given_to_torch = {name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
                      for name, value in env.items()}
    expected = evaluate(tree, env, np, "float64")
    got = evaluate(tree, given_to_torch, torch, "float64").numpy()
    assert got.dtype == expected.dtype
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-12)


def test_evaluate() -> None:
    env = values(0) | {"head_q": 1, "width": 0, "step": -3}
    q, kv, score = env["q_pos"], env["kv_pos"], env["score"]
    got = evaluate(read("cap * tanh(score / cap) - slope[head_q] * abs(q_pos - kv_pos)"), env, np)
    cap = np.float32(env["cap"])
    np.testing.assert_allclose(got, cap * np.tanh(score / cap) - env["slope"][1] * np.abs(q - kv), rtol=1e-5, atol=1e-5)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(evaluate(read("doc[kv_pos] == doc[q_pos]", MASK), env, np),
                                  env["doc"][3 + kv] == env["doc"][3 + q])
    assert evaluate(read("q_pos // width + q_pos % width"), env, np).max() == 0
    np.testing.assert_array_equal(evaluate(read("(q_pos - 9) // step"), env, np), (q - 9) // -3)
    assert float(evaluate(read("table[q_pos * 1000]"), env, np)[0, 0]) == env["table"][6]
    assert float(evaluate(read("-2147483648 // -1"), env, np)) == -2.0**31
    with pytest.raises(SpecError, match="gain has no value"):
        evaluate(read("gain"), {}, np)
    with pytest.raises(SpecError, match="slope has 2 dimensions"):
        evaluate(read("slope[0]"), {"slope": np.zeros((2, 2))}, np)


@settings(max_examples=100, deadline=None)
@given(texts(depth=4), st.integers(0, 2**16))
def test_hoist_keeps_values(case: tuple[Any, str], seed: int) -> None:
    kind, text = case
    try:
        tree = canonical(read(text, kind))
    except SpecError:
        return
    hoisted, env = hoist(tree), values(seed)
    expected = evaluate(tree, env, np)
    for parts, reads in ((hoisted.uniform, set()), (hoisted.row, {"q_pos"}), (hoisted.column, {"kv_pos"})):
        for part in parts:
            found = {node.name for node in walk(part.tree) if isinstance(node, Name)}
            assert found & {"q_pos", "kv_pos", "score"} == reads
    env |= {part.name.name: evaluate(part.tree, env, np) for part in hoisted.uniform + hoisted.row + hoisted.column}
    np.testing.assert_array_equal(evaluate(hoisted.rest, env, np), expected)


def test_hoist() -> None:
    hoisted = hoist(read("score * slope[head_q] + exp(gain * float(kv_pos)) - float(q_pos // 4 + kv_pos + width)"))
    assert [part.tree.text for part in hoisted.uniform] == ["slope[head_q]"]
    assert [part.tree.text for part in hoisted.row] == ["q_pos // 4 + width"]
    assert [part.tree.text for part in hoisted.column] == ["exp(float(kv_pos) * gain)"]
    assert to_cuda(hoisted.rest) == "column_0 + score * uniform_0 - float(wrap_add(row_0, kv_pos))"


SHIM = r"""
#include <cmath>
#include <cstdint>
#define FG_DEVICE static inline
FG_DEVICE int min_int(int a, int b) { return a < b ? a : b; }
FG_DEVICE int max_int(int a, int b) { return a > b ? a : b; }
FG_DEVICE float exp2_approx(float x) { return exp2f(x); }
FG_DEVICE float log2_approx(float x) { return log2f(x); }
FG_DEVICE float rcp_approx(float x) { return 1.0f / x; }
"""
HELPERS = re.sub("#.*", "", (TEMPLATES / "include" / "flashgen" / "expression.cuh").read_text(encoding="utf-8"))
C_TYPES = {"int": "int", "float": "float", "bool": "bool"}
C_NAMES = CUDA_NAMES | {"dim:num_heads_q": "4", "dim:seqlen_q": "seqlen_q", "dim:seqlen_kv": "seqlen_kv",
                        "size:total_q": "(1 << 30)", "size:total_kv": "(1 << 30)"}


def c_source(trees: list[Expr]) -> str:
    """A function for each tree, over all positions. The parameters are one struct, scalars first to last."""
    members = "".join(f"  const {C_TYPES[p.type]}{'*' if isinstance(p, TensorParam) else ''} user_{name};\n"
                      for name, p in PARAMS.items())
    functions = "".join(f"""
extern "C" void f{i}({C_TYPES[tree.type]}* out, const Params& p, const float* scores, int head_q, int batch,
                     int head_kv, int seqlen_q, int seqlen_kv, int kv_begin) {{
  for (int row = 0; row < seqlen_q; ++row)
    for (int kv_pos = 0; kv_pos < seqlen_kv; ++kv_pos) {{
      const int q_first = seqlen_kv - seqlen_q, q_pos = row + q_first;
      const float score = scores[row * seqlen_kv + kv_pos];
      out[row * seqlen_kv + kv_pos] = {to_cuda(tree, C_NAMES)};
    }}
}}""" for i, tree in enumerate(trees))
    return f"{SHIM}{HELPERS}struct Params {{\n{members}}};\n{functions}\n"


def run_c(library: ctypes.CDLL, index: int, tree: Expr, env: dict[str, Any]) -> np.ndarray:
    kinds = {"int": ctypes.c_int, "float": ctypes.c_float, "bool": ctypes.c_bool}
    fields = [(name, ctypes.c_void_p if isinstance(p, TensorParam) else kinds[p.type]) for name, p in PARAMS.items()]
    struct = type("Params", (ctypes.Structure,), {"_fields_": fields})
    params = struct(*(env[name].ctypes.data if isinstance(p, TensorParam) else env[name] for name, p in PARAMS.items()))
    dtypes = {"float": np.float32, "bool": np.bool_, "int": np.int32}
    out: np.ndarray = np.empty((SEQLEN_Q, SEQLEN_KV), dtypes[tree.type])
    numbers = [env[name] for name in ("head_q", "batch", "head_kv", "seqlen_q", "seqlen_kv", "kv_begin")]
    getattr(library, f"f{index}")(ctypes.c_void_p(out.ctypes.data), ctypes.byref(params),
                                  ctypes.c_void_p(env["score"].ctypes.data), *map(ctypes.c_int, numbers))
    return out


def compiled(trees: list[Expr], folder: Path) -> ctypes.CDLL:
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the CUDA text with")
    (folder / "text.cpp").write_text(c_source(trees), encoding="utf-8")
    # No contraction: products and sums are rounded one by one, as by numpy.
    subprocess.run(["g++", "-std=c++17", "-O1", "-Wall", "-Wno-unused", "-Werror", "-fsanitize=undefined",
                    "-fno-sanitize-recover", "-fno-sanitize=float-divide-by-zero", "-ffp-contract=off", "-shared",
                    "-fPIC", "text.cpp", "-o", "text.so"], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "text.so"))


SHOWN = ["cap * tanh(score / cap) - slope[head_q] * abs(q_pos - kv_pos)", "tanh(score)", "exp(2 * score)",
         "exp(-score)",
         "log(abs(score))", "sigmoid(100 * score)", "tanh(1e30 * score)", "tanh(1e-3 * score)", "score / 0.0",
         "float(-2147483648 // step) + q_pos // width", "float(abs(-2147483648) % width)", "exp(-2 * score * gain)",
         "score if q_pos < kv_pos else gain if flag else -1", "float(2147483647 + q_pos * 2147483647 - step)"]


@pytest.mark.parametrize("special", [False, True], ids=["exact", "special"])
def test_cuda_text_on_the_host(special: bool, tmp_path: Path) -> None:
    """Bit for bit where every operation is exact or rounded once; else within a few times what float32 loses."""
    rng = random.Random(7 + special)
    trees = drawn(rng, "score", 60, special=special) + drawn(rng, "mask", 60, special=special)
    if special:
        trees = [tree for tree in trees if has_exact_conditions(tree)] + [canonical(read(text)) for text in SHOWN]
        assert len(trees) > 80
    library = compiled(trees, tmp_path)
    for seed in range(4):
        env = values(seed, quarters=seed == 0)
        env["score"][0, :4] = [0.0, -0.0, 88.0, -200.0]
        if seed == 3:
            env["score"][1, :3] = [np.nan, np.inf, -np.inf]
        for i, tree in enumerate(trees):
            got = run_c(library, i, tree, env)
            expected = np.broadcast_to(evaluate(tree, env, np), got.shape)
            if special:
                agree(got, expected, np.broadcast_to(evaluate(tree, env, np, "float64"), got.shape), tree.text)
            else:
                np.testing.assert_array_equal(got, expected, err_msg=tree.text)


def has_exact_conditions(tree: Expr) -> bool:
    """Whether no comparison hangs on a special function, whose last bit would decide `gain < log(exp(gain))`."""
    inside = [node for side in walk(tree) if isinstance(side, Op) and side.op in ("lt", "le", "eq", "ne")
              for node in walk(side)]
    return not any(isinstance(node, Op) and node.op in ("exp", "log", "tanh", "sigmoid") for node in inside)


def agree(got: np.ndarray, single: np.ndarray, double: np.ndarray, text: str) -> None:
    """Where float32 and float64 tell apart what an expression magnifies, `got` may be off by as much again."""
    if got.dtype == np.bool_:
        assert (got == single).all(), text
        return
    with np.errstate(all="ignore"):
        loss = np.abs(single - double)
        steady = loss <= 1e-4 * np.abs(double) + 1e-6
        tolerance = 16 * loss + 3e-5 * np.abs(double) + 2e-6
        wrong = steady & np.isfinite(single) & ~(np.abs(got - single) <= tolerance)
        other = ~np.isfinite(single) & ~np.isfinite(double) & (np.isnan(got) != np.isnan(single))
    assert not wrong.any() and not other.any(), (text, got[wrong | other][:3], single[wrong | other][:3])


def test_tanh_is_accurate(tmp_path: Path) -> None:
    library = compiled([read("tanh(score)")], tmp_path)
    env = values(0)
    scores = np.concatenate([s * np.geomspace(1e-30, 30, SEQLEN_Q * SEQLEN_KV // 2) for s in (1, -1)])
    env["score"] = np.ascontiguousarray(scores.reshape(SEQLEN_Q, SEQLEN_KV).astype(np.float32))
    np.testing.assert_allclose(run_c(library, 0, read("tanh(score)"), env), np.tanh(env["score"].astype(np.float64)),
                               rtol=2.0**-21)


def difference(tree: Expr, env: dict[str, Any], name: str, step: float, place: Any = None) -> Any:
    """(f(x + step) - f(x - step)) / (2 step) in float64, of a name or of one element of a tensor."""
    ends = []
    for sign in (1, -1):
        moved = np.array(env[name], dtype=np.float64)
        moved[() if place is None else place] += sign * step
        ends.append(evaluate(tree, env | {name: moved}, np, "float64"))
    return (ends[0] - ends[1]) / (2 * step)


def check_derivative(tree: Expr, found: Any, env: dict[str, Any], name: str, place: Any = None) -> int:
    """Compares where two steps give one quotient, so that there is no kink nearby and rounding does not show, and where
    all values inside are finite. Returns at how many places."""
    with np.errstate(all="ignore"):
        wide, narrow = (difference(tree, env, name, step, place) for step in (2e-4, 1e-4))
        value = evaluate(tree, env, np, "float64")
        steady = (np.abs(wide - narrow) <= 1e-6 * np.abs(narrow)) & (np.abs(value) < 1e4 * np.abs(narrow) + 1e3)
    for node in walk(tree):
        if node.type == "float":
            steady = steady & np.isfinite(evaluate(node, env, np, "float64"))
    found, narrow, steady = np.broadcast_arrays(found, narrow, steady)
    np.testing.assert_allclose(found[steady], narrow[steady], rtol=1e-5, atol=1e-6, err_msg=tree.text)
    return int(steady.sum())


SMOOTH = ["score * score * gain", "score / gain", "gain / (score * score + 1)", "exp(score / 4) + log(abs(score) + 1)",
          "cap * tanh(score / cap)", "sigmoid(gain * score) * score", "abs(score - gain)", "min(score, gain, cap)",
          "max(score * gain, cap)", "score if score > 0 else exp(score) - 1", "-(-score) - 2 * score", "score + q_pos"]


@pytest.mark.parametrize("text", SMOOTH)
@pytest.mark.parametrize("name", ["score", "gain", "cap"])
def test_derivative(text: str, name: str) -> None:
    env = values(3) | {"gain": 1.7, "cap": -2.2}
    tree = canonical(read(text))
    found = evaluate(derivative(tree, name), env, np, "float64")
    assert check_derivative(tree, found, env, name)
    if name not in names_of(tree):
        assert derivative(tree, name).text == "0.0"


def test_derivative_of_drawn_expressions() -> None:
    rng, compared = random.Random(5), 0
    for i, tree in enumerate(drawn(rng, "score", 150)):
        env = values(i)
        for name in ("score", "gain"):
            compared += check_derivative(tree, evaluate(derivative(tree, name), env, np, "float64"), env, name)
        for name in ("slope", "bias"):
            if name in names_of(tree):
                compared += check_tensor(tree, name, env)
    assert compared > 20_000


def check_tensor(tree: Expr, name: str, env: dict[str, Any]) -> int:
    """The terms of each element, put together, against the quotient of that element."""
    terms = tensor_derivative(tree, name)
    compared = 0
    for place in list(np.ndindex(env[name].shape))[:: 5 if name == "bias" else 1]:
        total = np.zeros((SEQLEN_Q, SEQLEN_KV))
        for term in terms:
            hit = np.bool_(True)
            for index, at, size in zip(term.indices, place, env[name].shape, strict=True):
                hit = hit & (np.clip(evaluate(index, env, np), 0, size - 1) == at)
            total = total + np.where(hit, evaluate(term.multiplier, env, np, "float64"), 0.0)
        compared += check_derivative(tree, total, env, name, place)
    return compared


def test_derivative_agrees_with_autograd() -> None:
    env = values(1)
    tree = canonical(read("cap * tanh(score / cap) * sigmoid(score) + bias[head_q, q_pos - kv_pos] * score"))
    given_to_torch: dict[str, Any] = {"head_q": env["head_q"]}
    given_to_torch |= {name: torch.tensor(env[name]) for name in ("q_pos", "kv_pos")}
    given_to_torch |= {name: torch.tensor(env[name], dtype=torch.float64, requires_grad=True)
                       for name in ("score", "bias", "cap")}
    evaluate(tree, given_to_torch, torch, "float64").sum().backward()
    np.testing.assert_allclose(evaluate(derivative(tree, "score"), env, np, "float64"), given_to_torch["score"].grad)
    np.testing.assert_allclose(evaluate(derivative(tree, "cap"), env, np, "float64").sum(), given_to_torch["cap"].grad)
    [term] = tensor_derivative(tree, "bias")
    summed = np.zeros(env["bias"].shape)
    row, column = (evaluate(index, env, np) for index in term.indices)
    np.add.at(summed, np.broadcast_arrays(row, np.clip(column, 0, 8)), evaluate(term.multiplier, env, np, "float64"))
    np.testing.assert_allclose(summed, given_to_torch["bias"].grad)


def test_derivative_choices_at_kinks() -> None:
    env = {"score": np.float64(0.0), "gain": 0.0, "cap": 1.0}

    def at_zero(text: str, name: str = "score") -> float:
        return float(evaluate(derivative(read(text), name), env, np, "float64"))

    assert at_zero("abs(score)") == 0
    assert at_zero("min(gain, score)", "gain") == 1  # the first in canonical order
    assert at_zero("min(gain, score)", "score") == 0
    assert at_zero("max(0, score)") == 0
    assert at_zero("min(log(score - 1), score)") == 1  # of NaN and a number, the number
    assert at_zero("score if score < 0 else 2 * score") == 2


@pytest.mark.parametrize(("call", "words"), [
    (lambda: derivative(read("score"), "q_pos"), None), (lambda: derivative(read("q_pos + score"), "q_pos"), "int"),
    (lambda: derivative(read("slope[0]"), "slope"), "slope: float32"),
    (lambda: derivative(read("flag", MASK), "score"), "bool"),
    (lambda: tensor_derivative(read("slope[0]"), "slpe"), "no float32 tensor"),
    (lambda: tensor_derivative(read("table[0]"), "table"), "no float32 tensor"),
])
def test_no_derivative(call: Any, words: str | None) -> None:
    if words is None:
        assert call().text == "0.0"
        return
    with pytest.raises(SpecError, match=words):
        call()
