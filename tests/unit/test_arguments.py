"""Numbers of other types, the edges of the scale, and an `out` whose memory is not its own."""
from __future__ import annotations

import itertools
import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mla_kit import decode
from torch.utils._python_dispatch import TorchDispatchMode

import flashgen
from flashgen.codegen.expr.tree import round_float
from flashgen.codegen.families.shared.launch import LOG2_E
from flashgen.errors import FlashgenError, SpecError, UnsupportedError
from flashgen.runtime.ops import tensors
from flashgen.runtime.ops.arguments import flag, number, whole
from flashgen.runtime.ops.mla_decode.problem import MlaProblem
from flashgen.runtime.ops.overlap import overlap, overlaps_itself


def qkv(*shape: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(shape, generator=generator).bfloat16() for _ in range(3))
    return q, k, v


def refused(*arguments: Any, **keywords: Any) -> UnsupportedError:
    with pytest.raises(UnsupportedError) as caught:
        flashgen.attention(*arguments, **keywords)
    return caught.value


# ---- the scale

def test_the_range_of_scales_is_that_of_float32() -> None:
    """B115, B116: what a kernel gets of a scale is normal and finite at both ends, and not beyond them."""
    tiny = float(np.finfo(np.float32).tiny)
    for scale in (tensors.SCALE_MIN, tensors.SCALE_MAX):
        for passed in (scale, scale * LOG2_E):
            assert tiny <= round_float(passed) < math.inf
    assert round_float(math.nextafter(tensors.SCALE_MIN, 0) * (1 - 2**-24)) < tiny
    assert math.isinf(round_float(tensors.SCALE_MAX * (1 + 2**-24) * LOG2_E))


@pytest.mark.parametrize("spec", [None, "fa3_fwd", flashgen.variant("score * 1.0", name="same")], ids=str)
def test_scales_at_the_edges(spec: Any) -> None:
    """B115: the least scale gives the mean of v; what float32 cannot hold is refused."""
    q, k, v = qkv(1, 5, 1, 64)
    out = flashgen.attention(q, k, v, softmax_scale=tensors.SCALE_MIN, spec=spec)
    assert torch.allclose(out.float(), v.float().mean(1, keepdim=True).expand_as(v), atol=2**-8, rtol=2**-7)
    for scale in (1e-46, 1e-38, 2.4e38, 1e300, 10**400, -1.0, 0.0, -0.0, math.nan, math.inf):
        error = refused(q, k, v, softmax_scale=scale, spec=spec)
        assert error.where == "softmax_scale" and error.allowed == tensors.SCALE_ALLOWED
    assert refused(q, k, v, softmax_scale=1e-46).nearest == repr(tensors.SCALE_MIN)
    assert refused(q, k, v, softmax_scale=1e300).nearest == repr(tensors.SCALE_MAX)


def test_scales_of_a_decode() -> None:
    """B115, B116."""
    x = MlaProblem((5,), 4, 1, 64).make_inputs()
    for scale in (1e-46, 1e300):
        with pytest.raises(UnsupportedError) as caught:
            decode(x.with_(softmax_scale=scale))
        assert caught.value.where == "softmax_scale" and caught.value.allowed == tensors.SCALE_ALLOWED


# ---- numbers by value

NUMBERS = [-1, 0, 1, 2, 3, 0.5, 1.5, -1.0, 0.0, 1.0, 3.0, True, False, np.int64(3), np.float32(0.5), np.float64(1),
           np.bool_(True), Fraction(1, 2), Fraction(3), Decimal("0.5"), Decimal(1), 1 + 0j, 1 + 1j, math.inf, 10**30]


def meaning(function: Any, value: Any) -> Any:
    try:
        return function("x", value), type(function("x", value))
    except UnsupportedError:
        return None


@pytest.mark.parametrize("function", [number, flag, lambda name, value: whole(name, value, -1, 9)],
                         ids=["number", "flag", "whole"])
def test_equal_values_mean_the_same(function: Any) -> None:
    """B131: a memo answers for whatever equals its key, so equal values are accepted alike."""
    for one, other in itertools.combinations(NUMBERS, 2):
        if hash(one) == hash(other) and one == other:
            found, again = meaning(function, one), meaning(function, other)
            assert (found is None) == (again is None) and (found is None or found[0] == again[0]), (one, other)


ALIKE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"window": window}, {"window": (3, 0)}) for window in (
        [3, 0], torch.tensor([3, 0]), np.array([3, 0]), (np.int64(3), 0), (3.0, False),
        (torch.tensor(3), np.int8(0)))] + [
    ({"window": (10**30, 1)}, {"window": (-1, 1)}), ({"causal": 1}, {"causal": True}),
    ({"causal": np.bool_(True)}, {"causal": True}), ({"causal": torch.tensor(False)}, {"causal": False}),
    ({"softmax_scale": np.float32(0.5)}, {"softmax_scale": 0.5}), ({"softmax_scale": 1}, {"softmax_scale": 1.0}),
    ({"softmax_scale": torch.tensor(0.5)}, {"softmax_scale": 0.5}),
    ({"max_seqlen_q": np.int64(9), "max_seqlen_kv": torch.tensor(9)}, {}), ({"params": {}}, {})]


@pytest.mark.parametrize(("given", "meant"), ALIKE, ids=lambda value: ascii(value)[:40])
def test_numbers_of_other_types(given: dict[str, Any], meant: dict[str, Any]) -> None:
    """B131, B132, B133: with and without torch's dispatcher."""
    q, k, v = qkv(1, 9, 2, 32)
    expected = flashgen.attention(q, k, v, **meant)
    assert torch.equal(flashgen.attention(q, k, v, **given), expected)

    class Listens(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return func(*args, **(kwargs or {}))

    with Listens():
        assert torch.equal(flashgen.attention(q, k, v, **given), expected)


def test_parameters_of_other_types() -> None:
    """B133."""
    q, k, v = qkv(1, 9, 2, 32)
    capped = flashgen.variant("c * score", params={"c": {"type": "float"}})
    expected = flashgen.attention(q, k, v, spec=capped, params={"c": 2.0})
    for value in (2, np.float64(2), np.float32(2), np.int32(2), torch.tensor(2.0), torch.tensor(2)):
        assert torch.equal(flashgen.attention(q, k, v, spec=capped, params={"c": value}), expected)
    for wrong in (None, "2", [2], True, math.nan, 10**400, torch.tensor([1.0, 2.0]), torch.zeros((), device="meta")):
        assert "'c'" in refused(q, k, v, spec=capped, params={"c": wrong}).where
    for wrong in (5, "c", [("c", 2.0)]):
        assert refused(q, k, v, spec=capped, params=wrong).where == "params"


def test_lengths_of_other_types() -> None:
    """B131: one length for all requests of a decode."""
    x = MlaProblem((5, 5), 4, 1, None).make_inputs()
    expected = flashgen.mla_decode(x.q, x.kv_cache, torch.tensor([5, 5], dtype=torch.int32))
    for length in (5, np.int64(5), torch.tensor(5), 5.0):
        assert torch.equal(flashgen.mla_decode(x.q, x.kv_cache, length), expected)
    for wrong in (-1, 2**40, "5", [5, 5], None, 1.5):
        with pytest.raises(UnsupportedError) as caught:
            flashgen.mla_decode(x.q, x.kv_cache, wrong)
        assert caught.value.where == "seqlens_kv"


@pytest.mark.parametrize(("name", "wrong"), [
    *(("window", value) for value in (None, 5, (1,), (1.5, 0), (1, 2, 3), "ab", b"ab", {1: 2, 3: 4}, (-2, 0))),
    *(("causal", value) for value in ([1], 2, "yes", None)), ("softmax_scale", "1"), ("softmax_scale", b"1"),
    ("out", 5), ("return_lse", "x"), ("return_lse", torch.zeros(2)), ("spec", 5), ("max_seqlen_q", "x"),
    ("max_seqlen_kv", 1.5)], ids=ascii)
def test_wrong_values_name_their_argument(name: str, wrong: Any) -> None:
    """B132."""
    error = refused(*qkv(1, 5, 1, 32), **{name: wrong})
    assert error.where == name and error.allowed and name in error.what


def test_a_number_on_another_device_is_refused_unread() -> None:
    """B131: no call waits for the device unasked."""
    there = torch.empty((), device="meta")
    for name, value in (("softmax_scale", there), ("causal", there), ("return_lse", there),
                        ("window", torch.empty(2, device="meta"))):
        error = refused(*qkv(1, 5, 1, 32), **{name: value})
        assert error.where == name and "wait" in error.what and "wait" in error.next


def test_words_that_help() -> None:
    x, sink = MlaProblem((5,), 4, 1, 64).make_inputs(), torch.zeros(4).bfloat16()
    q, k, v = qkv(1, 5, 1, 32)
    assert refused(q.float(), k.float(), v.float()).what == "q has dtype torch.float32"
    with pytest.raises(UnsupportedError) as caught:
        decode(x.with_(sink=sink))
    assert caught.value.next == "sink.to('cpu', torch.float32).contiguous()"
    assert eval(caught.value.next).dtype is torch.float32
    with pytest.raises(SpecError) as long:
        flashgen.variant("score + " + "1 + " * 3000 + "1")
    assert "characters" in long.value.what and "8192" in long.value.allowed
    with pytest.raises(FlashgenError) as missing:
        flashgen.explain("fa3_fwdd")
    assert missing.value.nearest == "fa3_fwd"


# ---- out

@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    return tuple(shape), tuple(draw(st.integers(0, 12)) for _ in shape)


def places(layout: tuple[tuple[int, ...], tuple[int, ...]]) -> list[int]:
    shape, strides = layout
    return [sum(i * s for i, s in zip(index, strides, strict=True))
            for index in itertools.product(*map(range, shape))]


@settings(max_examples=400)
@given(layouts(), layouts(), st.integers(-40, 40))
def test_overlap_is_exact(one: Any, other: Any, distance: int) -> None:
    """B125: against the set of all places."""
    assert overlaps_itself(*one) == (len(set(places(one))) < len(places(one)))
    shared = set(places(one)) & {place + distance for place in places(other)}
    assert overlap(*one, *other, distance) == bool(shared)


def test_the_search_for_overlap_ends() -> None:
    """B125: layouts of coprime strides cost a bounded search, and count as overlapping where it gives up."""
    assert overlaps_itself((2**20,) * 6, (1000003, 1000033, 1000037, 1000039, 1000081, 1000099))


@pytest.mark.parametrize("spec", [None, "fa3_fwd"])
def test_an_out_that_overlaps_itself(spec: str | None) -> None:
    """B125: expanded, and with rows that run into each other."""
    q, k, v = qkv(2, 9, 1, 64)
    for out in (torch.empty(1, 9, 1, 64).bfloat16().expand(2, -1, -1, -1),
                torch.empty(2000).bfloat16().as_strided(q.shape, (640, 32, 64, 1)),
                torch.empty(2, 1, 1, 64).bfloat16().expand(-1, 9, -1, -1)):
        for return_lse in (False, True):
            error = refused(q, k, v, out=out, spec=spec, return_lse=return_lse)
            assert error.where == "out" and "share memory" in error.what
    slope = flashgen.variant("score * slope[head_q]",
                             params={"slope": {"type": "tensor", "dtype": "float32", "shape": ["num_heads_q"]}})
    assert refused(q, k, v, out=out, spec=slope, params={"slope": torch.ones(1)}).where == "out"
    with pytest.raises(UnsupportedError) as caught:
        torch.ops.flashgen.attention_out(q, k, v, None, None, 0, -1, -1, 0.1, "", out=out)
    assert caught.value.where == "out"


def test_an_out_that_inputs_lie_in() -> None:
    """B125: blocks would read what others have written. Slices of one packed tensor are fine."""
    packed = torch.randn(1, 9, 8, 32).bfloat16()
    q, k, v, free = packed.split(2, 2)
    expected = flashgen.attention(q.clone(), k.clone(), v.clone())
    for name, out in (("q", q), ("k", packed[:, :, 3:5]), ("v", packed[:, :, 5:7])):
        error = refused(q, k, v, out=out)
        assert error.where == "out" and f"with {name}" in error.what
    assert flashgen.attention(q, k, v, out=free) is free and torch.equal(free, expected)
    x = MlaProblem((5, 5), 4, 1, None).make_inputs()
    for name, source in (("q", x.q), ("kv_cache", x.kv_cache)):
        with pytest.raises(UnsupportedError) as caught:
            flashgen.mla_decode(x.q, x.kv_cache, 5, out=source.reshape(-1)[:2 * 4 * 512].view(2, 1, 4, 512))
        assert caught.value.where == "out" and f"with {name}" in caught.value.what
