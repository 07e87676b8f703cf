"""The kernel's tile rule in Python against brute force, and what explain derives from it."""
from __future__ import annotations

import functools
import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flashgen
from flashgen.codegen.explain import Explanation, Shape, explain, parse_shape, typical
from flashgen.codegen.explain_text import BAR_WIDTH, bar, si
from flashgen.codegen.mask import KeyRange, kv_tiles, tile_counts, visible_keys, visible_pairs
from flashgen.codegen.render import TEMPLATES
from flashgen.codegen.spec import Spec, load_specs, shipped_spec_paths
from flashgen.codegen.target import TARGETS
from flashgen.errors import UnsupportedError

settings.register_profile("explain", deadline=None, derandomize=True)
settings.load_profile("explain")

LINES, COLUMNS = 50, 120  # one screen
sides = st.sampled_from((-1, 0, 1, 2, 5, 17, 60, 2**31 - 1))
masks = st.fixed_dictionaries({"window": st.tuples(sides, sides), "top_left": st.booleans()})
lengths = st.integers(0, 45)
blocks = st.sampled_from((1, 3, 4, 8, 16))


def brute(seqlen_q: int, seqlen_kv: int, window: tuple[int, int], top_left: bool) -> list[set[int]]:
    """The keys that each query sees, from the contract's sentences rather than from intervals."""
    shift = 0 if top_left else seqlen_kv - seqlen_q
    left, right = window
    return [{j for j in range(seqlen_kv) if (left < 0 or j - (i + shift) >= -left)
             and (right < 0 or j - (i + shift) <= right)} for i in range(seqlen_q)]


@given(lengths, lengths, masks)
def test_visible_keys_and_pairs(seqlen_q: int, seqlen_kv: int, mask: dict[str, Any]) -> None:
    rows = brute(seqlen_q, seqlen_kv, **mask)
    for i, row in enumerate(rows):
        keys = visible_keys(i, seqlen_q, seqlen_kv, **mask)
        assert row == set(range(keys.first, keys.last + 1))
    assert visible_pairs(seqlen_q, seqlen_kv, **mask) == sum(map(len, rows))


@given(lengths, lengths, masks, blocks, blocks)
def test_tiles_cover_what_is_visible_and_mask_what_is_not(seqlen_q: int, seqlen_kv: int, mask: dict[str, Any],
                                                         block_m: int, block_n: int) -> None:
    rows, visited, masked = brute(seqlen_q, seqlen_kv, **mask), 0, 0
    for start in range(0, seqlen_q, block_m):
        own = rows[start:start + block_m]
        ends = [visible_keys(i, seqlen_q, seqlen_kv, **mask) for i in (start, start + len(own) - 1)]
        tiles = kv_tiles(ends[0], ends[1], block_n)
        assert 0 <= tiles.begin <= tiles.full_begin <= tiles.full_end <= tiles.end
        seen = {key // block_n for row in own for key in row}
        assert seen <= set(range(tiles.begin, tiles.end))
        if own[0] and own[-1]:  # then no tile is visited in vain
            assert seen == set(range(tiles.begin, tiles.end))
        for tile in range(tiles.full_begin, tiles.full_end):
            whole = set(range(tile * block_n, (tile + 1) * block_n))
            assert all(whole <= row for row in own)
        visited += tiles.end - tiles.begin
        masked += tiles.end - tiles.begin - (tiles.full_end - tiles.full_begin)
    counts = tile_counts(seqlen_q, seqlen_kv, block_m, block_n, **mask)
    assert (counts.query_tiles, counts.visited, counts.masked) == (-(-seqlen_q // block_m), visited, masked)
    assert counts.keys_loaded <= counts.visited * block_n


@pytest.mark.parametrize(("top", "bottom", "expected"), [
    (KeyRange(0, 99), KeyRange(0, 99), (0, 0, 6, 7)),       # full, 100 keys: the last tile is cut
    (KeyRange(0, 0), KeyRange(0, 31), (0, 0, 0, 2)),        # causal: every tile on the diagonal is cut
    (KeyRange(0, 31), KeyRange(0, 62), (0, 0, 2, 4)),       # causal, further down
    (KeyRange(0, -9), KeyRange(0, -1), (0, 0, 0, 0)),       # rows before the first key: nothing to visit
    (KeyRange(0, -9), KeyRange(0, 3), (0, 0, 0, 1)),
    (KeyRange(20, 52), KeyRange(35, 67), (1, 3, 3, 5)),     # window: cut on both sides, no tile whole
    (KeyRange(20, 84), KeyRange(35, 99), (1, 3, 5, 7)),
])
def test_tile_rule_by_hand(top: KeyRange, bottom: KeyRange, expected: tuple[int, ...]) -> None:
    assert tuple(kv_tiles(top, bottom, 16)) == expected


class CInt(int):
    """An int that divides as C does: towards zero."""

    def __truediv__(self, other: int) -> CInt:  # type: ignore[override]
        return CInt(abs(self) // other * (1 if self >= 0 else -1))

    def __add__(self, other: int) -> CInt:
        return CInt(int(self) + other)

    def __sub__(self, other: int) -> CInt:
        return CInt(int(self) - other)


@functools.cache
def kv_tiles_of_the_header() -> Any:
    """kv_tiles of mask.cuh, made Python by a change of spelling, so that the two cannot drift apart."""
    text = (TEMPLATES / "include/flashgen/mask.cuh").read_text()
    body = re.search(r"KvTiles kv_tiles\(.*?\) \{\n(.*?)\n\}", text, re.DOTALL)[1]  # type: ignore[index]
    body = re.sub(r"//.*", "", body).replace("KvTiles tiles;", "tiles = SimpleNamespace()")
    body = re.sub(r"if \((.*?)\) ", r"if \1: ", body).replace(";", "")
    names: dict[str, Any] = {"SimpleNamespace": SimpleNamespace, "max_int": lambda a, b: CInt(max(a, b)),
                             "clamp_int": lambda x, low, high: CInt(min(max(x, low), high))}
    exec(f"def kv_tiles(top, bottom, BLOCK_N):\n{body}", names)
    return names["kv_tiles"]


keys = st.builds(KeyRange, st.builds(CInt, st.integers(0, 200)), st.builds(CInt, st.integers(-50, 200)))


@given(keys, keys, blocks)
def test_the_rule_is_that_of_the_header(top: KeyRange, bottom: KeyRange, block_n: int) -> None:
    found = kv_tiles_of_the_header()(top, bottom, block_n)
    assert kv_tiles(top, bottom, block_n) == (found.begin, found.full_begin, found.full_end, found.end)


def variant(**changes: Any) -> Spec:
    fields: dict[str, Any] = dict(name="fa2_fwd", family="fa2", pass_="fwd", arch="sm_90", dtype="bf16",
                                  head_dim_qk=128)
    return Spec(**{**fields, **changes})


def test_flops_and_bytes_of_a_full_problem() -> None:
    e = explain(variant(), batch=2, seqlen_q=1024, num_heads_q=4)
    heads, block_m = 2 * 4, e.plan.constant("BLOCK_M")
    assert e.work.flops == 4 * heads * 1024 * 1024 * 128
    assert e.work.flops_issued >= e.work.flops
    tensor = heads * 1024 * 128 * 2
    lse = heads * 1024 * 4
    assert e.traffic.once == 4 * tensor + lse
    assert e.traffic.scores == 4 * heads * 1024 * 1024 * 2
    assert e.traffic.standard == 4 * tensor + e.traffic.scores
    assert e.traffic.kv == 2 * tensor * (1024 // block_m)
    assert e.traffic.kernel == 2 * tensor + lse + e.traffic.kv


def test_causal_halves_and_lse_and_gqa_count() -> None:
    full, causal = explain(variant(), seqlen_q=4096), explain(variant(causal=True), seqlen_q=4096)
    assert causal.work.flops * 2 * 4096 == full.work.flops * 4097
    assert 0.5 < causal.work.flops_issued / full.work.flops_issued < 0.6
    assert causal.work.tiles.masked < causal.work.tiles.visited < full.work.tiles.visited
    without = explain(variant(lse=False), seqlen_q=4096)
    assert full.traffic.kernel - without.traffic.kernel == 4 * 2 * 16 * 4096
    gqa = explain(variant(), seqlen_q=4096, num_heads_q=16, num_heads_kv=2)
    assert gqa.traffic.kv == full.traffic.kv  # each query head streams its kv head anew
    assert gqa.traffic.once < full.traffic.once


@given(st.integers(1, 4), st.integers(1, 600), st.integers(1, 600), st.integers(1, 3), st.sampled_from((1, 2)))
def test_traffic_equals_a_walk_over_the_tiles(batch: int, seqlen_q: int, seqlen_kv: int, heads_kv: int, ratio: int
                                              ) -> None:
    spec = variant(window=True, head_dim_qk=64, head_dim_v=40)
    window = (100, 30)
    e = explain(spec, batch=batch, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, num_heads_q=heads_kv * ratio,
                num_heads_kv=heads_kv, window=window)
    block_m, block_n, loaded = e.plan.constant("BLOCK_M"), e.plan.constant("BLOCK_N"), 0
    for start in range(0, seqlen_q, block_m):
        last = min(start + block_m, seqlen_q) - 1
        tiles = kv_tiles(visible_keys(start, seqlen_q, seqlen_kv, window),
                         visible_keys(last, seqlen_q, seqlen_kv, window), block_n)
        loaded += sum(min(block_n, seqlen_kv - tile * block_n) for tile in range(tiles.begin, tiles.end))
    heads = batch * heads_kv * ratio
    assert e.traffic.kv == heads * loaded * (64 + 40) * 2
    assert e.traffic.kernel - e.traffic.kv == heads * seqlen_q * ((64 + 40) * 2 + 4)
    assert e.work.flops <= e.work.flops_issued or e.work.flops == 0


def test_streamed_bytes_follow_the_law() -> None:
    """Theorem 2: k and v traffic grows as N^2 d^2 / M, with one constant for all N."""
    small, large = (explain(variant(), seqlen_q=n) for n in (4096, 16384))
    assert large.traffic.law == 16 * small.traffic.law
    assert large.traffic.kv / large.traffic.law == pytest.approx(small.traffic.kv / small.traffic.law)
    assert 1 < large.traffic.kv / large.traffic.law < 20


def test_roofline_names_what_bounds() -> None:
    long = explain(variant(), batch=1, seqlen_q=16384)
    assert long.roofline.bound == "tensor cores" and long.roofline.ms == long.roofline.tensor_ms
    device = TARGETS["sm_90"].device
    assert long.roofline.tflops <= device.bf16_tflops
    assert 0 < long.roofline.l2_share < 1  # what bounds it holds only while L2 serves re-reads
    decode = explain(variant(tile=None), batch=8, seqlen_q=64, seqlen_kv=65536, num_heads_q=8)
    assert decode.roofline.memory_once_ms <= decode.roofline.ms
    assert decode.roofline.ms == max(decode.roofline.memory_once_ms, decode.roofline.tensor_ms)


@pytest.mark.parametrize("path", shipped_spec_paths(), ids=lambda path: path.stem)
def test_every_shipped_variant_fits_one_screen(path: Any) -> None:
    for spec in load_specs(path).specs:
        lines = str(explain(spec, registers=200)).splitlines()
        assert len(lines) <= LINES and max(map(len, lines)) <= COLUMNS, spec.variant


def test_the_text_says_where_its_numbers_come_from() -> None:
    e = explain(variant(causal=True), registers=231)
    text = str(e)
    for word in ("fa2_fwd_bf16_d128_causal.sm_90", "231 of", "cached build", "N^2 d^2 / M", "H200", "bound: tensor"):
        assert word in text
    assert "not built" in str(explain(variant()))
    for constant in e.plan.constants:
        assert constant.name in text and constant.reason in text
    for region in e.plan.smem:
        assert f"{region.offset_bytes:>7} {region.size_bytes:>7}" in text


def test_json_holds_the_same_numbers() -> None:
    e = explain(variant(causal=True), seqlen_q=2048)
    data = json.loads(json.dumps(e.to_json()))
    assert data["work"]["flops"] == e.work.flops and data["traffic"]["kernel"] == e.traffic.kernel
    assert data["work"]["tiles"]["visited"] == e.work.tiles.visited
    assert data["plan"]["variant"] == e.plan.variant and data["shape"]["seqlen_kv"] == 2048
    assert data["device"]["name"] == "H200-SXM" and data["roofline"]["bound"] == e.roofline.bound


def test_a_file_gives_its_most_ordinary_variant() -> None:
    e = flashgen.explain("fa2_fwd")
    assert e.plan.kernel_name == "fa2_fwd_bf16_d128_causal.sm_90"
    assert e.variants == len(load_specs(shipped_spec_paths()[0]).specs) and f"1 of {e.variants}" in str(e)
    assert typical([variant(head_dim_qk=64), variant(causal=True), variant()]) == variant(causal=True)
    assert isinstance(flashgen.explain(str(shipped_spec_paths()[0])), Explanation)


@pytest.mark.parametrize(("problem", "what"), [
    ({"seqlen": 5}, "nearest: seqlen_"), ({"batch": 0}, "batch is 0"), ({"batch": True}, "batch is True"),
    ({"batch": 2.0}, "batch is 2.0"), ({"num_heads_q": 3, "num_heads_kv": 2}, "multiple"),
    ({"window": (1, 2)}, "has none"), ({"window": (1,)}, "two counts"), ({"window": (-2, 0)}, "two counts"),
    ({"window": "ab"}, "two counts"),
])
def test_sizes_that_make_no_call_are_refused(problem: dict[str, Any], what: str) -> None:
    with pytest.raises(UnsupportedError, match="problem") as caught:
        explain(variant(causal=True), **problem)
    assert what in str(caught.value)


def test_shape_twins_follow() -> None:
    assert Shape.of(seqlen_q=7, num_heads_q=3) == Shape(2, 7, 7, 3, 3)
    assert Shape.of(seqlen_q=7, seqlen_kv=9) == Shape(2, 7, 9, 16, 16)


def test_parse_shape() -> None:
    assert parse_shape(" batch=2  seqlen_q=8192 window=16,-1 ") == {"batch": 2, "seqlen_q": 8192, "window": (16, -1)}
    assert parse_shape("") == {}


@given(st.text(st.sampled_from("abq_=,-12 \t"), max_size=30))
def test_parse_shape_refuses_with_one_error_only(text: str) -> None:
    try:
        found = parse_shape(text)
    except UnsupportedError:
        return
    assert len(found) == len(text.split())


@given(st.floats(0, 1e20))
def test_si_keeps_three_digits(value: float) -> None:
    number, unit = si(value, "B").split()
    scale = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "PB": 1e15, "EB": 1e18}[unit]
    assert float(number) * scale == pytest.approx(value, rel=0.01, abs=0.01)
    assert len(number) <= 5


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(1, 10**6))
def test_bars_have_one_width_and_show_what_exists(first: int, size: int, whole: int) -> None:
    text = bar(min(first, whole), min(size, whole - min(first, whole)), whole)
    assert len(text) == BAR_WIDTH
    assert ("█" in text) == (min(size, whole - min(first, whole)) > 0)
