"""Tile classes as kernels work them out, compiled for the host: never wrong, and exact for masks that people use."""
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
from expr_strategies import PARAMS, SEQLEN_KV, SEQLEN_Q, values, write
from test_expr_values import C_NAMES, C_TYPES, HELPERS, SHIM

from flashgen.codegen.expr.canon import canonical
from flashgen.codegen.expr.evaluate import evaluate
from flashgen.codegen.expr.params import read_params
from flashgen.codegen.expr.parse import parse
from flashgen.codegen.expr.spans import compiled as compiled_spans
from flashgen.codegen.expr.tiles import TileClass, tile_class
from flashgen.codegen.expr.tree import Expr, Index, Param, TensorParam, walk
from flashgen.codegen.render import TEMPLATES
from flashgen.errors import SpecError

SPANS = re.sub("#.*", "", (TEMPLATES / "include" / "flashgen" / "span.cuh").read_text(encoding="utf-8"))
NUMBERS = ("head_q", "batch", "head_kv", "seqlen_q", "seqlen_kv", "q_first", "q_begin", "kv_begin")
VISIBLE, MASKED = 1, 2
Params = dict[str, Param]


def compiled(trees: list[Expr], params: Params, folder: Path) -> ctypes.CDLL:
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the CUDA text with")
    dtypes = {"float32": "float", "int32": "int", "bool": "bool"}
    members = "".join(f"  const {dtypes[p.dtype]}* user_{name};\n" if isinstance(p, TensorParam)
                      else f"  {C_TYPES[p.type]} user_{name};\n" for name, p in params.items())
    functions = "\n".join(
        f'extern "C" int f{i}(const Params& p, int q0, int q1, int k0, int k1, '
        f'{", ".join(f"int {name}" for name in NUMBERS)}) {{\n{body(tile_class(tree, C_NAMES))}}}'
        for i, tree in enumerate(trees))
    (folder / "text.cpp").write_text(f"{SHIM}{HELPERS}{SPANS}struct Params {{\n{members}}};\n{functions}\n")
    subprocess.run(["g++", "-std=c++17", "-O1", "-Wall", "-Wno-unused", "-Wno-parentheses", "-Werror",
                    "-fsanitize=undefined", "-fno-sanitize-recover", "-ffp-contract=off", "-shared", "-fPIC",
                    "text.cpp", "-o", "text.so"], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "text.so"))


def body(of_tiles: TileClass) -> str:
    members = "".join(f" {kind} {name};" for kind, name, _ in of_tiles.rows)
    parts = "".join(f"  rows.{name} = {text};\n" for _, name, text in of_tiles.rows)
    return (f"  struct {{ Span q_span;{members} }} rows = {{}};\n  rows.q_span = {{q0, q1}};\n{parts}"
            f"  const Span kv_span = {{k0, k1}};\n  return {of_tiles.text};\n")


def found(library: ctypes.CDLL, index: int, params: Params, env: dict[str, Any], box: tuple[int, ...]) -> int:
    kinds = {"int": ctypes.c_int, "float": ctypes.c_float, "bool": ctypes.c_bool}
    fields = [(name, ctypes.c_void_p if isinstance(p, TensorParam) else kinds[p.type]) for name, p in params.items()]
    struct = type("Params", (ctypes.Structure,), {"_fields_": fields})
    given = struct(*(env[name].ctypes.data if isinstance(p, TensorParam) else env[name] for name, p in params.items()))
    return int(getattr(library, f"f{index}")(ctypes.byref(given), *box, *(env.get(name, 0) for name in NUMBERS)))


def truth(tree: Expr, env: dict[str, Any], box: tuple[int, ...], dtype: str) -> int:
    q0, q1, k0, k1 = box
    seen = np.atleast_1d(evaluate(tree, env | {
        "q_pos": np.arange(q0, q1 + 1, dtype=np.int32)[:, None], "kv_pos": np.arange(k0, k1 + 1, dtype=np.int32)[None]},
        np, dtype))
    return (VISIBLE if seen.any() else 0) | (MASKED if not seen.all() else 0)


def test_sound(tmp_path: Path) -> None:
    """A bit that is missing is a proof, for random masks with all that the language has; the same bits in Python."""
    rng, trees = random.Random(3), []
    while len(trees) < 150:
        try:
            trees.append(canonical(parse(write(rng, "mask", 3), PARAMS, "mask")))
        except SpecError:
            continue
    library, known = compiled(trees, PARAMS, tmp_path), 0
    offset = SEQLEN_KV - SEQLEN_Q
    for i, tree in enumerate(trees):
        for seed in range(12):
            env = values(seed, quarters=bool(seed % 2))
            env["doc"][:] = np.sort(env["doc"])
            q0, q1 = sorted(rng.choices(range(offset, offset + SEQLEN_Q), k=2))
            k0, k1 = sorted(rng.choices(range(SEQLEN_KV), k=2))
            got = found(library, i, PARAMS, env, (q0, q1, k0, k1))
            assert got & 3 == got != 0
            if not any(isinstance(node, Index) or node.type == "float" for node in walk(tree)):
                assert compiled_spans(tree, env)((q0, q1), (k0, k1)) == got, (tree.text, q0, q1, k0, k1)
            for dtype in ("float32", "float64"):
                assert truth(tree, env, (q0, q1, k0, k1), dtype) & ~got == 0, (tree.text, q0, q1, k0, k1)
            known += got != VISIBLE | MASKED
    assert known > 500


WORDS = read_params({
    **{name: {"type": "int"} for name in ("window", "sinks", "prefix", "chunk", "step", "right")},
    "doc": {"type": "tensor", "dtype": "int32", "shape": ["seqlen_kv"], "sorted": True},
    "loose": {"type": "tensor", "dtype": "int32", "shape": ["seqlen_kv"]},
    "keep": {"type": "tensor", "dtype": "bool", "shape": ["seqlen_kv"]},
    "blocks": {"type": "tensor", "dtype": "bool", "shape": [8, 16]},
    "until": {"type": "tensor", "dtype": "int32", "shape": [4]}})
# (mask, whether whole tiles are always known for what they are; tiles that see nothing always are)
EXACT: list[tuple[str, bool]] = [
    ("kv_pos <= q_pos", True), ("q_pos - kv_pos < window and kv_pos <= q_pos", True),
    ("kv_pos <= q_pos and (q_pos - kv_pos < window or kv_pos < sinks)", False),
    ("abs(q_pos - kv_pos) <= window", True), ("kv_pos <= q_pos or kv_pos < prefix", False),
    ("kv_pos // chunk == q_pos // chunk", True), ("kv_pos // chunk == q_pos // chunk and kv_pos <= q_pos", True),
    ("-window <= kv_pos - q_pos <= right", True), ("doc[q_pos] == doc[kv_pos]", True),
    ("doc[q_pos] == doc[kv_pos] and kv_pos <= q_pos", True), ("loose[kv_pos] < 3", True), ("keep[kv_pos]", True),
    ("blocks[q_pos // 16, kv_pos // 16]", True), ("blocks[q_pos // 16, kv_pos // 16] and kv_pos <= q_pos", False),
    ("kv_pos < until[head_q]", True), ("not kv_pos > q_pos", True), ("kv_pos <= q_pos if window > 3 else True", True),
    ("(q_pos - kv_pos) % step == 0", False), ("False", True), ("True", True)]


def test_exact(tmp_path: Path) -> None:
    """Tiles without a visible key are skipped, all of them; whole ones are known, unless two reasons share a tile."""
    trees = [canonical(parse(text, WORDS, "mask")) for text, _ in EXACT]
    library, rng = compiled(trees, WORDS, tmp_path), np.random.default_rng(1)
    size, tile_q, tile_kv = 128, 32, 16
    for seed in range(8):
        env: dict[str, Any] = {
            "window": (1, 20, 37, 500)[seed % 4], "sinks": (0, 4)[seed % 2], "prefix": (0, 30, 64)[seed % 3],
            "chunk": (24, 32, 7)[seed % 3], "step": 3, "right": (0, 9)[seed % 2], "head_q": seed % 4,
            "seqlen_q": size, "seqlen_kv": size, "doc": np.cumsum(rng.random(size) < 0.05).astype(np.int32),
            "loose": rng.integers(0, 4, size).astype(np.int32), "keep": np.repeat(rng.random(8) < 0.5, 16),
            "blocks": rng.random((8, 16)) < 0.5, "until": np.array([0, 40, 64, 128], np.int32)}
        env["loose"][:48] = seed % 4
        for i, (text, whole) in enumerate(EXACT):
            for q0 in range(0, size, tile_q):
                for k0 in range(0, size, tile_kv):
                    box = (q0, q0 + tile_q - 1, k0, k0 + tile_kv - 1)
                    got, expected = found(library, i, WORDS, env, box), truth(trees[i], env, box, "float64")
                    if text.startswith(("(q_pos", "doc")) or ("blocks" in text and "and" in text):  # what has holes
                        assert expected & ~got == 0
                        continue
                    assert (got & VISIBLE) == (expected & VISIBLE), (text, box, env)
                    assert not whole or got == expected, (text, box, env)
