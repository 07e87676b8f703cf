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
from flashgen.codegen.explain.counts import Shape, parse_shape
from flashgen.codegen.explain.explain import explain, explain_plan, typical
from flashgen.codegen.explain.text import BAR_WIDTH, Explanation, bar, si
from flashgen.codegen.families.flashmla.explain import DecodeExplanation
from flashgen.codegen.families.registry import lower
from flashgen.codegen.mask import KeyRange, kv_tiles, query_tiles, tile_counts, visible_keys, visible_pairs
from flashgen.codegen.plan import Barrier, Constant, Launch, Param, Plan, Role, TensorMap, verify
from flashgen.codegen.render import TEMPLATES
from flashgen.codegen.smem import layout_regions
from flashgen.codegen.spec.spec import Spec, load_specs, shipped_spec_paths, spec_path
from flashgen.codegen.target import TARGETS
from flashgen.codegen.warpgroup import register_need
from flashgen.codegen.wgmma import WgmmaShape
from flashgen.errors import UnsupportedError

settings.register_profile("explain", deadline=None, derandomize=True)
settings.load_profile("explain")

LINES, COLUMNS = 50, 120  # one screen; a taller one for plans with barriers
LINES_WITH_BARRIERS = 76
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


@given(lengths, st.integers(1, 4), st.integers(1, 70))
def test_query_tiles(seqlen_q: int, groups: int, group: int) -> None:
    """Each query once, in order; all tiles but one whole: the last, or the first, which has whole groups."""
    for spans in (query_tiles(seqlen_q, groups * group), query_tiles(seqlen_q, groups * group, group)):
        assert [i for first, last in spans for i in range(first, last + 1)] == list(range(seqlen_q))
        assert len(spans) == -(-seqlen_q // (groups * group))
        assert all(last + 1 - first == groups * group for first, last in spans[1:-1])
    if len(spans) > 1:
        assert (spans[0][1] + 1) % group == 0 and -(-(spans[-1][1] + 1 - spans[-1][0]) // group) == groups


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


def test_a_decode_is_bound_by_memory_or_by_products() -> None:
    few = explain("mla_h100", batch=128, seqlen_kv=32768, num_heads_q=16)
    many = explain("mla_h100", batch=128, seqlen_kv=32768, num_heads_q=128, seqlen_q=2)
    assert isinstance(few, DecodeExplanation) and isinstance(many, DecodeExplanation)
    assert few.plan.variant == "mla_h100_bf16_d576v512_paged64"
    assert few.work.memory_ms > few.work.tensor_ms and many.work.tensor_ms > many.work.memory_ms
    assert few.work.bytes_once == few.work.bytes_asked == 2 * 128 * (32768 * 576 + 16 * (576 + 512))
    assert few.work.flops_issued == 4 * few.work.flops and many.work.flops_issued == many.work.flops
    assert (few.work.row_blocks, many.work.row_blocks, many.work.parts) == (1, 4, 132 // 4)
    text = str(many)
    assert "bound: tensor cores" in text and "KV" in text and few.to_json()["work"]["row_blocks"] == 1


@pytest.mark.parametrize("problem", [{"heads": 16}, {"batch": 0}, {"seqlen_kv": 1.5}])
def test_sizes_that_make_no_decode(problem: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=r"whole numbers|batch, seqlen_q"):
        explain("mla_h100", **problem)


def test_roofline_names_what_bounds() -> None:
    long = explain(variant(), batch=1, seqlen_q=16384)
    assert long.roofline.bound == "tensor cores" and long.roofline.ms == long.roofline.units["tensor cores"]
    device = TARGETS["sm_90"].device
    assert long.roofline.tflops <= device.bf16_tflops
    assert 0 < long.roofline.l2_share < 1  # what bounds it holds only while L2 serves re-reads
    decode = explain(variant(tile=None), batch=8, seqlen_q=64, seqlen_kv=65536, num_heads_q=8)
    assert list(decode.roofline.units) == ["tensor cores", "device memory"]
    assert decode.roofline.ms == max(decode.roofline.units.values())


def wgmma_plan(head_dim: int, block_n: int, warpgroups: int = 3, stages: int = 3) -> tuple[Plan, Spec]:
    """A plan on wgmma by hand, with the Spec it would come from."""
    spec = variant(name="fa3_fwd", family="fa3", arch="sm_90a", head_dim_qk=head_dim)
    block_m, tile = 64 * warpgroups, 2 * block_n * head_dim
    constants = {"BLOCK_M": block_m, "BLOCK_N": block_n, "HEAD_DIM_QK": head_dim, "HEAD_DIM_V": head_dim,
                 "MMA_COLS_QK": head_dim, "MMA_COLS_V": head_dim}
    smem = layout_regions((("Q", 2 * block_m * head_dim, "query tiles"), ("K", stages * tile, "keys"),
                           ("V", stages * tile, "values"), ("BARRIERS", 8 * (4 * stages + 1), "mbarriers")))
    barriers = tuple(Barrier(name, stages, arrivals, f"a stage of {name[0]} is {name[2:]}") for name, arrivals in (
        ("K_FULL", 1), ("K_EMPTY", warpgroups), ("V_FULL", 1), ("V_EMPTY", warpgroups)))
    plan = Plan(
        variant=spec.variant, target="sm_90a", family="fa3", pass_="fwd", spec=spec.fields(), template="none",
        element="bf16", constants=tuple(Constant(name, value, "given") for name, value in constants.items()),
        slots=(), flags=(), smem=smem, params=tuple(Param(name, ctype, "") for name, ctype in (
            ("k", "element_ptr"), ("v", "element_ptr"), ("k_map", "tensor_map"), ("v_map", "tensor_map"))),
        roles=(Role("load", 4, 32), Role("mma", 4 * warpgroups, 160)),
        launch=Launch(128 * (warpgroups + 1), 1, smem[-1].offset_bytes + smem[-1].size_bytes, "x = SMs"),
        tensor_maps=tuple(TensorMap(f"{name}_map", name, 64, block_n, 128) for name in "kv"),
        barriers=(*barriers, Barrier("Q_FULL", 1, 1, "the query tile is there")),
        wgmma_shapes=(WgmmaShape("bf16", block_n), WgmmaShape("bf16", head_dim, "registers", b_major="MN_MAJOR")))
    verify(plan, TARGETS["sm_90a"])
    return plan, spec


@pytest.mark.parametrize(("head_dim", "bound", "exp2", "issue"), [
    (32, "exponential unit", 1, 0.75), (64, "tensor cores", 1, 0.75), (128, "tensor cores", 0.5, 0.375),
    (192, "tensor cores", 1 / 3, 0.25)])
def test_roofline_of_wgmma_counts_what_a_softmax_takes(head_dim: int, bound: str, exp2: float, issue: float) -> None:
    r = explain_plan(*wgmma_plan(head_dim, 64, stages=2), seqlen_q=8192).roofline
    assert list(r.units) == ["tensor cores", "exponential unit", "issue slots", "device memory"]
    assert r.units[r.bound] == r.ms == max(r.units.values())
    assert r.bound == bound or r.units[bound] == pytest.approx(r.ms)
    assert r.units["exponential unit"] / r.ms == pytest.approx(exp2)
    assert r.units["issue slots"] / r.ms == pytest.approx(issue)


def test_times_of_wgmma_by_hand() -> None:
    """1920 queries and keys over 24 heads: 240 whole tiles of 192 rows, so 24 * 1920**2 scores."""
    e = explain_plan(*wgmma_plan(128, 80), batch=1, seqlen_q=1920, num_heads_q=24)
    scores, device = 24 * 1920 * 1920, TARGETS["sm_90a"].device
    assert (e.work.scores, e.work.query_tiles, e.work.waves) == (scores, 240, 240 / 132)
    clocks_per_ms = device.bf16_tflops * 1e9 / 4096
    assert clocks_per_ms / device.num_sms == pytest.approx(1.83e6, rel=0.01)
    assert e.roofline.units["tensor cores"] == pytest.approx(scores * 4 * 128 / 4096 / clocks_per_ms)
    assert e.roofline.units["issue slots"] == pytest.approx(scores * 6 / 128 / clocks_per_ms)


def test_text_of_a_persistent_kernel() -> None:
    e = explain_plan(*wgmma_plan(128, 80), batch=1, seqlen_q=1920, num_heads_q=24)
    assert e.need == register_need(80, 128) and e.need.total == 40 + 20 + 64 + 24
    lines = str(e).splitlines()
    assert len(lines) <= LINES_WITH_BARRIERS and max(map(len, lines)) <= COLUMNS
    for words in (
        "roles: 65536 of 65536 registers, which are 512 threads * 128 at launch (not built",
        "load 4 warps * 32 * 32 = 4096",
        "mma 12 warps * 32 * 160 = 61440 at least scores 40 + probabilities 20 + output 64 + 24 = 148",
        "barriers: 13,", "K_EMPTY 3 * 3 arrivals a stage of K is EMPTY", "Q_FULL 1 * 1 arrivals the query tile",
        "v_map v 80 rows * 64 columns = 10240 bytes a copy, swizzle 128", "2 waves, the last 82 % full",
        " 50 %: 1 exp2 per score, 16 per SM clock", " 38 %: 6 instructions per score, 128 per SM clock",
        "100 %: 512 FLOP per score, 4096 per SM clock", "bound: tensor cores = 100 %, ",
    ):
        assert any(words in " ".join(line.split()) for line in lines), words
    barriers = next(region for region in e.plan.smem if region.name == "BARRIERS")
    assert f"{barriers.offset_bytes:>7} {barriers.size_bytes:>7}" in str(e)
    data = json.loads(json.dumps(e.to_json()))
    assert data["need"]["scores"] == 40 and data["roofline"]["units"]["issue slots"] > 0
    assert data["plan"]["barriers"][0]["name"] == "K_FULL" and data["plan"]["tensor_maps"][0]["box_rows"] == 80


@pytest.mark.parametrize("head_dims", [(32, 32), (72, 40), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window": True}], ids=str)
def test_plans_of_fa3_fit_their_screen(head_dims: tuple[int, int], mask: dict[str, bool]) -> None:
    for layout in ("dense", "varlen"):
        e = explain(variant(name="fa3_fwd", family="fa3", arch="sm_90a", head_dim_qk=head_dims[0],
                            head_dim_v=head_dims[1], kv_layout=layout, **mask), registers=168)
        lines = str(e).splitlines()
        assert len(lines) <= LINES_WITH_BARRIERS and max(map(len, lines)) <= COLUMNS
        assert "(168 in the cached build)" in str(e) and e.need is not None
        assert e.need.total <= max(role.registers or 0 for role in e.plan.roles)
        assert all(barrier.about.split()[0] in str(e) for barrier in e.plan.barriers)


def test_roles_that_move_no_registers_keep_to_one_line() -> None:
    assert "roles:" not in str(explain(variant())) and "barriers" not in str(explain(variant()))
    assert explain(variant()).need is None


@pytest.mark.parametrize("path", shipped_spec_paths(), ids=lambda path: path.stem)
def test_every_shipped_variant_fits_one_screen(path: Any) -> None:
    for spec in load_specs(path).specs:
        if spec.pass_ == "schedule":
            with pytest.raises(UnsupportedError, match="whose work is not counted"):
                explain(spec)
            continue
        lines = str(explain(spec, registers=200)).splitlines()
        most = LINES_WITH_BARRIERS if lower(spec).barriers else LINES
        assert len(lines) <= most and max(map(len, lines)) <= COLUMNS, spec.variant


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
    assert e.variants == len(load_specs(spec_path("fa2_fwd")).specs) and f"1 of {e.variants}" in str(e)
    assert typical([variant(head_dim_qk=64), variant(causal=True), variant()]) == variant(causal=True)
    assert isinstance(flashgen.explain(str(spec_path("fa2_fwd"))), Explanation)


@pytest.mark.parametrize(("problem", "what"), [
    ({"seqlen": 5}, "nearest: seqlen_"), ({"batch": 0}, "batch is 0"), ({"batch": True}, "batch is true"),
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
