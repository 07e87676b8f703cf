"""Expressions: what is refused and where, the tree's text, the canonical form, and the values of all that prints it."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from expr_strategies import PARAMS, texts
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgen.codegen.expr.canon import canonical
from flashgen.codegen.expr.cuda import to_cuda
from flashgen.codegen.expr.params import MAX_PARAMS, read_params
from flashgen.codegen.expr.parse import MAX_DEPTH, MAX_SIZE, MAX_TEXT, parse
from flashgen.codegen.expr.tree import Expr, ScalarParam, TensorParam
from flashgen.errors import SpecError

SCORE, MASK = "score", "mask"
WORDS = ["score", "q_pos", "(", ")", "[", "]", ",", "-", "not ", "+", "//", "1", "2.5", " if ", " else ", "min", "<",
         "slope", "==", " and ", "flag", "bias"]
NESTED = "(" * (MAX_DEPTH + 1) + "score" + ")" * (MAX_DEPTH + 1)


def read(text: str, kind: Any = SCORE) -> Expr:
    return parse(text, PARAMS, kind)


# (kind, text, column from 1, words of the message)
REFUSED: list[tuple[str, str, int, str]] = [
    (SCORE, "score.real", 6, "attribute"), (SCORE, "().__class__", 3, "attribute"), (SCORE, "1 .real", 3, "attribute"),
    (SCORE, "__import__", 1, "no known name"), (SCORE, "__import__('os')", 12, "string"),
    (SCORE, "eval(score)", 1, "no known function"), (SCORE, "score(1)", 1, "no known function"),
    (SCORE, "abs(score)(score)", 1, "only a function's name"), (SCORE, "slope[0](1)", 1, "only a function's name"),
    (SCORE, "lambda: score", 1, "word of Python"), (SCORE, "[score for score in doc]", 8, "word of Python"),
    (SCORE, "(x := score)", 4, "walrus"), (SCORE, "'a'", 1, "string"), (SCORE, 'f"{score}"', 2, "string"),
    (SCORE, "b'a'", 2, "string"), (SCORE, "{score}", 1, "set"), (SCORE, "{score: 1}", 1, "set"),
    (SCORE, "[1]", 1, "List"),
    (SCORE, "score, score", 1, "Tuple"), (SCORE, "(score, 1)", 1, "Tuple"), (SCORE, "()", 1, "Tuple"),
    (SCORE, "abs(*slope)", 5, "Starred"), (SCORE, "min(score, default=1)", 19, "assignment"),
    (SCORE, "score ** 2", 7, "power"), (SCORE, "9**9**9**9", 2, "power"), (SCORE, "1 << 99999999", 3, "shift"),
    (SCORE, "score @ score", 7, "no sign"), (SCORE, "q_pos & 1", 7, "no sign"), (SCORE, "q_pos | 1", 7, "no sign"),
    (SCORE, "~q_pos", 1, "no sign"), (SCORE, "+score", 1, "unary +"), (SCORE, "score;score", 6, "no sign"),
    (SCORE, "score # more", 7, "comment"), (SCORE, "score \\\n + 1", 7, "backslash"), (SCORE, "slope[1:2]", 8, "slice"),
    (SCORE, "slope[...]", 7, "attribute"), (SCORE, "score = 1", 7, "assignment"), (SCORE, "1j", 1, "complex"),
    (SCORE, "await score", 1, "word of Python"), (SCORE, "yield", 1, "word of Python"), (SCORE, "None", 1, "word of"),
    (MASK, "q_pos in doc", 7, "word of Python"), (MASK, "q_pos is kv_pos", 7, "word of Python"),
    (SCORE, "ѕcore", 1, "no sign"), (SCORE, "score − 1", 7, "no sign"), (SCORE, "ｓcore", 1, "no sign"),
    (SCORE, "score\u00a0+ 1", 6, "no sign"), (SCORE, "score\x00", 6, "no sign"), (SCORE, "scоre", 3, "no sign"),
    (SCORE, "score; asm(\"trap;\")", 6, "no sign"), (SCORE, "__syncthreads()", 1, "no known function"),
    (SCORE, "threadIdx.x", 10, "attribute"), (SCORE, "p->user", 2, "arrow"), (SCORE, "/* */ score", 1, "no expression"),
    (SCORE, "score // score", 1, "float and float"), (SCORE, "score % 2", 1, "float and int"),
    (SCORE, "q_pos // 0", 10, "division by zero"), (SCORE, "q_pos % (3 - 3)", 10, "division by zero"),
    (SCORE, "99999999999999999999999", 1, "too large"), (SCORE, "2147483648", 1, "too large"),
    (SCORE, "1" * 5000, 1, ""), (SCORE, "1e39", 1, "too large"), (SCORE, "1e999", 1, "too large"),
    (SCORE, "1e-60", 1, "too small"), (SCORE, "scorr", 1, "no known name"), (SCORE, "slop[0]", 1, "no known tensor"),
    (SCORE, "slope", 1, "without an index"), (SCORE, "abs", 1, "without its arguments"),
    (SCORE, "gain[0]", 1, "no tensor"),
    (SCORE, "(slope)[0.5]", 9, "an index is a float"), (SCORE, "slope[flag]", 7, "an index is a bool"),
    (SCORE, "slope[0, 1]", 1, "1 dimensions and 2 indices"), (SCORE, "bias[0]", 1, "2 dimensions and 1 indices"),
    (SCORE, "table[7] + score", 7, "outside"), (SCORE, "table[-1] + score", 7, "outside"),
    (SCORE, "slope[0][0]", 1, "only a tensor's name"), (SCORE, "abs()", 1, "one number"),
    (SCORE, "abs(score, 1)", 1, "one number"), (SCORE, "min(score)", 1, "two numbers"),
    (SCORE, "flag", 1, "a score is a bool"),
    (SCORE, "q_pos < 1", 1, "a score is a bool"), (MASK, "q_pos", 1, "a mask is an int"),
    (MASK, "1.0", 1, "a mask is a float"),
    (MASK, "score < 1", 1, "not known in a mask"), (SCORE, "flag + score", 1, "takes a bool"),
    (SCORE, "-flag", 2, "takes a bool"),
    (SCORE, "score + (q_pos < 1)", 10, "takes a bool"), (MASK, "not q_pos", 5, "operand of not is an int"),
    (MASK, "flag and q_pos", 10, "operand of and is an int"), (MASK, "flag < flag", 8, "compares a bool"),
    (MASK, "flag == 1", 9, "compares a bool with an int"), (SCORE, "score if gain else 1", 10, "condition is a float"),
    (SCORE, "score if flag else flag", 20, "branches"), (SCORE, "score if flag", 1, "no expression"),
    (SCORE, "", 1, "empty"), (SCORE, " \n ", 1, "empty"), (SCORE, "score +", 8, "no expression"),
    (SCORE, "(score", 1, "no expression"),
    (SCORE, "score)", 6, "no expression"), (SCORE, "a" * (MAX_TEXT + 1), MAX_TEXT + 1, "characters"),
    (SCORE, NESTED, MAX_DEPTH + 1, "nested"),
    (SCORE, "-" * 4000 + "score", 1, "nested"), (SCORE, "-" * 40 + "score", MAX_DEPTH + 2, "nested"),
    (MASK, "not " * 1000 + "flag", 1, "nested"), (SCORE, "+".join(["score"] * 700), 1, "too large"),
    (SCORE, "score" + "/2/score" * 60, 1, "nested"), (SCORE, "1 if flag else " * 60 + "score", 1, "nested"),
    (SCORE, "_", 1, "no known name"), (SCORE, "score score", 1, "no expression"),
    (SCORE, "  \n scorr", 5, "no known name"),
]


@pytest.mark.parametrize(("kind", "text", "column", "words"), REFUSED, ids=lambda value: ascii(value)[:24])
def test_refused(kind: Any, text: str, column: int, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse(text, PARAMS, kind, "spec.yaml:3:9")
    assert words in caught.value.what
    assert caught.value.allowed
    where, _, found = caught.value.where.rpartition(":")
    assert where == "spec.yaml:3:9"
    if column > 1:
        assert int(found) == column


def test_no_explosion_through_chains() -> None:
    """a < b < c holds b twice: nested middles would double at each level."""
    text = "kv_pos"
    for _ in range(12):
        text = f"(1 if 0 < {text} < 9 else 2)"
    with pytest.raises(SpecError, match="too large"):
        read(f"{text} < 3", MASK)


def test_nearest_name_and_function() -> None:
    for text, nearest in (("scoer", "score"), ("tahn(score)", "tanh"), ("slop[0]", "slope"), ("widht", "width")):
        with pytest.raises(SpecError) as caught:
            read(text)
        assert caught.value.nearest == nearest


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=80) | st.text(alphabet="score+-*/%()[],. 0123456789<>=!ifelsandotx_", max_size=80)
       | st.lists(st.sampled_from(WORDS), max_size=40).map("".join),
       st.sampled_from(["score", "mask"]))
def test_any_text_gives_a_tree_or_an_error(text: str, kind: Any) -> None:
    try:
        tree = read(text, kind)
    except SpecError as error:
        assert error.where and error.allowed
        return
    assert tree.type == ("float" if kind == "score" else "bool")
    assert tree.size <= MAX_SIZE + 1
    assert read(tree.text, kind) == tree


@pytest.mark.parametrize(("text", "printed"), [
    ("  score\n + 1 ", "score + 1.0"), ("score-1e3", "score + -1000.0"), ("0x10*score", "16.0 * score"),
    ("1_000 * score", "1000.0 * score"), ("score*0.1", "score * 0.1"), ("score / 1e20", "score / 1e+20"),
    ("q_pos+kv_pos+score", "float(q_pos + kv_pos) + score"), ("(score)", "score"), ("q_pos", "float(q_pos)"),
    ("a_gain", "a_gain"), ("score - (gain - 1)", "score - (gain + -1.0)"), ("-score * 2", "-score * 2.0"),
    ("-(score * 2)", "-(score * 2.0)"), ("q_pos - -2147483648", "float(q_pos + -(-2147483648))"),
])
def test_text(text: str, printed: str) -> None:
    params = {**PARAMS, "a_gain": ScalarParam("a_gain", "float")}
    tree = parse(text, params, "score")
    assert tree.text == printed
    assert parse(printed, params, "score") == tree


@settings(max_examples=100, deadline=None)
@given(texts(depth=4))
def test_text_and_canonical_form(case: tuple[Any, str]) -> None:
    """The text of a tree is the tree again; so for the canonical tree, which stays as it is and is no larger."""
    kind, text = case
    try:
        tree = read(text, kind)
    except SpecError as error:
        assert any(word in error.what for word in ("too large", "outside", "zero"))
        return
    assert read(tree.text, kind) == tree
    settled = canonical(tree)
    assert canonical(settled) == settled
    assert settled.text == canonical(settled).text
    assert settled.type == tree.type
    if settled.size <= MAX_SIZE:
        assert read(settled.text, kind).text == settled.text


SAME = [
    (SCORE, "score + gain", "gain + score"), (SCORE, "score + (gain + cap)", "(cap + score) + gain"),
    (SCORE, "score * gain * 2", "gain * (2 * score)"), (SCORE, "min(score, gain)", "min(gain, min(score, gain))"),
    (SCORE, "max(score, 1, 2)", "max(2, score)"), (SCORE, "score - -gain", "gain + score"),
    (SCORE, "-(-score)", "score"),
    (SCORE, "1 * score", "score"), (SCORE, "score / 1", "score"), (SCORE, "score / 4", "0.25 * score"),
    (SCORE, "-1 * score", "-score"), (SCORE, "(-score) * gain", "-(score * gain)"),
    (SCORE, "-score / gain", "score / -gain"),
    (SCORE, "2 * 3 * score", "6 * score"), (SCORE, "score + (1 + 2)", "score + 3"),
    (SCORE, "exp(0.0) * score", "score"),
    (SCORE, "abs(q_pos - kv_pos)", "abs(kv_pos - q_pos)"), (SCORE, "abs(-score)", "abs(score)"),
    (SCORE, "abs(score - gain)", "abs(gain - score)"), (SCORE, "abs(-2 * score)", "abs(2 * score)"),
    (SCORE, "q_pos + 0", "q_pos"), (SCORE, "q_pos * 0", "0"), (SCORE, "q_pos // 1", "q_pos"),
    (SCORE, "q_pos // -1", "-q_pos"),
    (SCORE, "q_pos % 1", "0"), (SCORE, "q_pos - q_pos", "0"), (SCORE, "-7 // 2", "-4"), (SCORE, "-7 % 3", "2"),
    (SCORE, "7 % -3", "-2"),
    (SCORE, "score if flag else score", "score"), (SCORE, "score if not flag else gain", "gain if flag else score"),
    (SCORE, "score if 1 < 2 else gain", "score"), (SCORE, "2147483647 + 1", "-2147483648"),
    (MASK, "q_pos > kv_pos", "kv_pos < q_pos"), (MASK, "q_pos >= kv_pos", "kv_pos <= q_pos"),
    (MASK, "q_pos <= 4", "q_pos < 5"),
    (MASK, "not q_pos < kv_pos", "q_pos >= kv_pos"), (MASK, "not (not flag)", "flag"),
    (MASK, "not q_pos == 1", "1 != q_pos"),
    (MASK, "flag and q_pos < 1", "q_pos < 1 and flag"), (MASK, "flag or flag", "flag"),
    (MASK, "flag and False", "False"),
    (MASK, "flag and True", "flag"), (MASK, "flag or True", "True"), (MASK, "flag == True", "flag"),
    (MASK, "flag != True", "not flag"),
    (MASK, "0 <= q_pos < 9", "q_pos < 9 and q_pos >= 0"), (MASK, "q_pos < q_pos", "False"),
    (MASK, "keep[q_pos, 0 + kv_pos]", "keep[q_pos, kv_pos]"),
    (MASK, "not gain == cap", "cap != gain"), (MASK, "True", "1 < 2"),
]
DIFFERENT = [  # what NaN, an infinity or rounding keeps apart
    (SCORE, "score - score", "0.0"), (SCORE, "0 * score", "0.0"), (SCORE, "score / score", "1.0"),
    (SCORE, "score / 3", "score * 0.3333333333"),
    (SCORE, "3e38 + 3e38 + score", "score"), (SCORE, "1 / 0.0", "score"), (SCORE, "log(-1.0)", "score"),
    (SCORE, "score / gain", "gain / score"),
    (MASK, "not gain < cap", "gain >= cap"), (MASK, "gain == gain", "True"), (MASK, "gain < cap", "cap < gain"),
    (SCORE, "score - gain", "gain - score"),
    (SCORE, "q_pos // 2", "q_pos / 2"), (SCORE, "score + 0.0", "score"),
]


@pytest.mark.parametrize(("kind", "one", "two"), SAME)
def test_same_key(kind: Any, one: str, two: str) -> None:
    assert canonical(read(one, kind)) == canonical(read(two, kind))


@pytest.mark.parametrize(("kind", "one", "two"), DIFFERENT)
def test_different_key(kind: Any, one: str, two: str) -> None:
    assert canonical(read(one, kind)).text != canonical(read(two, kind)).text


def test_key_holds_the_types_of_parameters() -> None:
    keys = {canonical(parse("score if width == step else 0", read_params(
        {"width": {"type": kind}, "step": {"type": kind}}), "score")) for kind in ("int", "float", "bool")}
    assert len(keys) == 3
    shaped = {canonical(parse("bias[head_q]", read_params(
        {"bias": {"type": "tensor", "dtype": "float32", "shape": [dim]}}), "score")) for dim in ("num_heads_q", 8)}
    assert len(shaped) == 2


BAD_PARAMS: list[tuple[Any, str, str]] = [
    ({"score": {"type": "int"}}, "params.score", "something else"), ({"tanh": {"type": "int"}}, "params.tanh", ""),
    ({"lambda": {"type": "int"}}, "params.lambda", ""), ({"a b": {"type": "int"}}, "params", "cannot name"),
    ({"a;b": {"type": "int"}}, "params", "cannot name"), ({"_a": {"type": "int"}}, "params", "cannot name"),
    ({"é": {"type": "int"}}, "params", "cannot name"), ({"a\n": {"type": "int"}}, "params", "cannot name"),
    ({"a" * 41: {"type": "int"}}, "params", "cannot name"), ({1: {"type": "int"}}, "params", "cannot name"),
    ({"a": 1}, "params.a", "is int"), ({"a": {}}, "params.a.type", "has no type"),
    ({"a": {"type": "flaot"}}, "params.a.type", "flaot"),
    ({"a": {"type": "int", "defualt": 1}}, "params.a", "unknown key"),
    ({"a": {"type": "int", "default": 1.5}}, "params.a.default", "1.5"),
    ({"a": {"type": "int", "default": True}}, "params.a.default", ""),
    ({"a": {"type": "int", "default": 2**31}}, "params.a.default", ""),
    ({"a": {"type": "float", "default": "x"}}, "params.a.default", ""),
    ({"a": {"type": "float", "default": float("nan")}}, "params.a.default", ""),
    ({"a": {"type": "bool", "default": 1}}, "params.a.default", ""),
    ({"a": {"type": "tensor", "shape": [1]}}, "params.a.dtype", ""),
    ({"a": {"type": "tensor", "dtype": "int64", "shape": [1]}}, "params.a.dtype", "int64"),
    ({"a": {"type": "tensor", "dtype": "int32"}}, "params.a.shape", ""),
    ({"a": {"type": "tensor", "dtype": "int32", "shape": []}}, "params.a.shape", ""),
    ({"a": {"type": "tensor", "dtype": "int32", "shape": [0]}}, "params.a.shape", "'0'"),
    ({"a": {"type": "tensor", "dtype": "int32", "shape": ["num_head_q"]}}, "params.a.shape", "num_head_q"),
    ([], "params", "is list"), ({f"a{i}": {"type": "int"} for i in range(MAX_PARAMS + 1)}, "params", "declares"),
]


@pytest.mark.parametrize(("declared", "where", "words"), BAD_PARAMS)
def test_refused_params(declared: Any, where: str, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        read_params(declared)
    assert caught.value.where == where
    assert words in caught.value.what
    assert caught.value.allowed


def test_params() -> None:
    assert PARAMS["cap"] == ScalarParam("cap", "float", 2.5)
    assert PARAMS["bias"] == TensorParam("bias", "float32", ("num_heads_q", 9))
    tenth = read_params({"x": {"type": "float", "default": 0.1}})["x"]
    assert tenth == ScalarParam("x", "float", float(np.float32(0.1)))


def test_user_text_never_reaches_cuda() -> None:
    params = read_params({"asm": {"type": "float"}, "double": {"type": "tensor", "dtype": "float32", "shape": [4]}})
    text = to_cuda(canonical(parse("1_0.50*score + asm*double[ head_q ]", params, "score")))
    assert text == "10.5f * score + p.user_asm * p.user_double[clamp_index(head_q, 4)]"
