"""Plans: they fit their target or are refused, survive JSON, agree with the CUDA struct, and decide the cache key."""
from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgen.codegen import plan as plans
from flashgen.codegen.families.fa2.tiles import TILES
from flashgen.codegen.families.registry import lower
from flashgen.codegen.plan import Plan, params_layout
from flashgen.codegen.render import render
from flashgen.codegen.smem import layout_regions
from flashgen.codegen.spec.rule import EXTRA
from flashgen.codegen.spec.spec import Roles, Spec, Tile
from flashgen.codegen.target import FEATURES, TARGETS
from flashgen.errors import PlanError, SpecError

BASE = Spec(name="t", family="fa2", pass_="fwd", arch="sm_90", dtype="bf16", head_dim_qk=128)

SIXTEENS = st.integers(1, 16).map(lambda x: 16 * x)
FIELDS = {
    "name": st.just("t"), "family": st.just("fa2"), "pass_": st.just("fwd"), "arch": st.sampled_from(list(TARGETS)),
    "dtype": st.sampled_from(["bf16", "fp16"]), "head_dim_qk": st.integers(1, 32).map(lambda x: 8 * x),
    "head_dim_v": st.none() | st.integers(1, 32).map(lambda x: 8 * x), "causal": st.booleans(), "window": st.booleans(),
    "kv_layout": st.sampled_from(["dense", "varlen"]), "lse": st.booleans(), "batch_invariant": st.booleans(),
    "tile": st.none() | st.builds(Tile, m=SIXTEENS, n=SIXTEENS),
    "stages": st.none() | st.integers(2, 5), "roles": st.none() | st.builds(Roles, mma=st.integers(1, 16)),
    "blocks_per_sm": st.none() | st.integers(1, 8), "q_operand": st.sampled_from([None, "shared", "registers"]),
}
FA3_FIELDS = FIELDS | {
    "family": st.just("fa3"), "arch": st.just("sm_90a"), "blocks_per_sm": st.none(), "q_operand": st.none(),
    "tile": st.none() | st.builds(Tile, m=st.sampled_from([64, 128, 192, 256]), n=SIXTEENS),
    "roles": st.none() | st.builds(Roles, mma=st.sampled_from([4, 8, 12, 16])),
    "q_stages": st.sampled_from([None, 1, 2]),
    "schedule": st.sampled_from([None, "overlap", "pingpong"]), "split": st.booleans(), "pack_gqa": st.booleans(),
}


@settings(deadline=None, max_examples=800)
@given(st.fixed_dictionaries(FIELDS) | st.fixed_dictionaries(FA3_FIELDS))
def test_any_valid_spec_gives_a_fitting_plan_or_a_refusal(fields):
    try:
        spec = Spec(**fields)
    except SpecError:
        return
    target = TARGETS[spec.arch]
    try:
        plan = lower(spec)
    except PlanError as error:
        assert error.where and error.allowed, "a refusal says where and what is allowed"
        return
    assert plan.launch.smem_bytes <= target.smem_per_block_bytes
    assert plan.launch.threads * plan.launch.min_blocks_per_sm <= target.max_threads_per_sm
    assert Plan.from_json(plan.to_json()) == plan
    assert render(plan).text == render(Plan.from_json(plan.to_json())).text


def test_every_tile_row_is_used_and_fits():
    seen = set()
    targets = [target for target in TARGETS.values() if target.is_nvidia]
    for target in targets:
        for qk, v in {(row.head_dim_qk, row.head_dim_v) for row in TILES.rows}:
            for change in ({}, {"causal": True}, {"window": True}):
                plan = lower(BASE.with_(arch=target.name, head_dim_qk=qk, head_dim_v=v, **change))
                seen.add((target.name, plan.notes))
    assert {name for name, _ in seen} == {target.name for target in targets}


def test_targets_check_themselves():
    for target in TARGETS.values():
        with pytest.raises(AssertionError):
            dataclasses.replace(target, smem_per_block_bytes=target.smem_per_sm_bytes)
        with pytest.raises(AssertionError):
            dataclasses.replace(target, cc=target.cc + 1)
    assert TARGETS["sm_80"].runs_on(86) and not TARGETS["sm_86"].runs_on(80) and not TARGETS["sm_80"].runs_on(90)
    assert TARGETS["sm_90a"].runs_on(90) and not TARGETS["sm_100a"].runs_on(103)
    assert set(FEATURES) == set().union(*(t.features for t in TARGETS.values()))


PLAN_FAULTS = {
    "threads": (lambda p: dataclasses.replace(p, launch=dataclasses.replace(p.launch, threads=96)), "warps"),
    "too much shared memory": (lambda p: dataclasses.replace(
        p, smem=layout_regions((("Q", 300000, ""),)), launch=dataclasses.replace(p.launch, smem_bytes=300000)),
        "Q 300000"),
    "overlapping regions": (lambda p: dataclasses.replace(
        p, smem=(p.smem[0], dataclasses.replace(p.smem[1], offset_bytes=16), *p.smem[2:])), "overlaps"),
    "map and launch differ": (lambda p: dataclasses.replace(
        p, launch=dataclasses.replace(p.launch, smem_bytes=p.launch.smem_bytes + 16)), "map ends"),
    "blocks do not fit an SM": (lambda p: dataclasses.replace(
        p, launch=dataclasses.replace(p.launch, min_blocks_per_sm=8)), "8 blocks per SM"),
    "another target": (lambda p: dataclasses.replace(p, target="sm_80"), "is for sm_80"),
}


@pytest.mark.parametrize("name", PLAN_FAULTS)
def test_verify_refuses(name):
    fault, expected = PLAN_FAULTS[name]
    plans.verify(lower(BASE), TARGETS["sm_90"])
    with pytest.raises(PlanError, match=expected):
        plans.verify(fault(lower(BASE)), TARGETS["sm_90"])


def test_refusals_show_the_arithmetic():
    with pytest.raises(PlanError, match=r"registers per thread"):
        lower(BASE.with_(tile=Tile(m=256, n=128), roles=Roles(mma=4)))
    with pytest.raises(PlanError, match=r"Q \d+ \+ K \d+ \+ V \d+"):
        lower(BASE.with_(head_dim_qk=256, stages=5))
    with pytest.raises(PlanError, match="multiples of 64"):
        lower(BASE.with_(tile=Tile(m=80, n=32)))


@pytest.mark.parametrize("change, rows", [
    ({"tile": Tile(m=128, n=64)}, 128), ({"tile": Tile(m=64, n=64)}, 64), ({"tile": Tile(m=192, n=48)}, 192),
    ({"roles": Roles(mma=4)}, 64), ({"roles": Roles(mma=12)}, 192),
    ({"roles": Roles(mma=8), "tile": Tile(m=128, n=32)}, 128),
])
def test_rows_and_warps_of_fa3_follow_each_other(change, rows):
    plan = lower(BASE.with_(family="fa3", arch="sm_90a", head_dim_qk=128, **change))
    assert plan.constant("BLOCK_M") == rows
    assert plan.roles[-1].warps == rows // 16 and plan.launch.threads == 2 * rows + 128
    # A warpgroup alone takes no turns, whatever the table says of its head dim.
    assert dict(plan.flags)["pingpong"] == (rows > 64)


def test_params_layout_is_the_c_layout():
    """Against ctypes, which lays structures out as the compiler does; the kernel asserts the size too."""
    import ctypes

    class Divisor(ctypes.Structure):
        _fields_ = (("value", ctypes.c_int32), ("multiplier", ctypes.c_uint32), ("shift", ctypes.c_uint32))

    kinds = {"Q": ctypes.c_uint64, "q": ctypes.c_int64, "i": ctypes.c_int32, "f": ctypes.c_float, "12s": Divisor}
    for change in ({}, {"window": True, "kv_layout": "varlen"}, {"lse": False}):
        plan = lower(BASE.with_(**change))
        members = [(p.name, kinds[plans.CTYPES[p.ctype].code]) for p in plan.params]
        struct_type = type("Params", (ctypes.Structure,), {"_fields_": members})
        assert ctypes.sizeof(struct_type) == plan.params_bytes()
        assert params_layout(plan.params)[1] == {name: getattr(struct_type, name).offset for name, _ in members}


CHANGES = {
    "name": "other", "arch": "sm_80", "dtype": "fp16", "head_dim_qk": 96, "head_dim_v": 32, "causal": True,
    "window": True, "kv_layout": "varlen", "lse": False, "batch_invariant": True, "tile": Tile(m=64, n=32), "stages": 3,
    "roles": Roles(mma=8), "blocks_per_sm": 1, "q_operand": "shared", "dropout": True,
}
FA3_CHANGES = {"family": "fa3", "q_stages": 2, "p_operand": "shared", "schedule": "overlap", "split": True,
               "pack_gqa": True}
MLA_CHANGES = {"pass": "schedule", "page_size": 1}
STANDARD_CHANGES = {"kernel": "values"}
BWD_CHANGES = {"deterministic": True}
EXPRESSIONS = {  # test_variants.py compiles these
    "score": {"score": "2 * score"}, "mask": {"mask": "kv_pos // 7 == q_pos // 7"}, "sink": {"sink": "per_head"},
    "align": {"align": "top_left", "score": "score + q_pos"}, "normalize": {"normalize": "none", "lse": False},
    "params": {"score": "gain * score", "params": {"gain": {"type": "float"}}}}


def test_every_spec_field_changes_the_cache_key():
    pytest.importorskip("cuda.bindings.nvrtc")
    from flashgen.runtime.compile.cache import cache_key

    def key(spec):
        plan = lower(spec)
        return cache_key(render(plan), plan)

    base = BASE.with_(head_dim_qk=64, head_dim_v=64)
    names = {name for name, _ in base.fields()} | {"arch"}
    assert names | set(EXTRA) == (CHANGES.keys() | FA3_CHANGES.keys() | MLA_CHANGES.keys() | STANDARD_CHANGES.keys() |
                                  BWD_CHANGES.keys() | EXPRESSIONS.keys())
    keys = {name: key(base.with_(**changes)) for name, changes in EXPRESSIONS.items()}
    keys |= {"base": key(base)} | {name: key(base.with_(**{name: value})) for name, value in CHANGES.items()}
    fa3 = base.with_(family="fa3", arch="sm_90a")
    keys |= {name: key(fa3.with_(**{name: value})) for name, value in FA3_CHANGES.items()}
    mla = base.with_(family="flashmla", arch="sm_90a", pass_="decode", head_dim_qk=576, head_dim_v=512,
                     kv_layout="paged", page_size=64)
    keys |= {"mla": key(mla)} | {name: key(mla.with_(**{"pass_" if name == "pass" else name: value}))
                                 for name, value in MLA_CHANGES.items()}
    standard = base.with_(family="standard", kernel="scores")
    keys |= {"standard": key(standard)} | {name: key(standard.with_(**{name: value}))
                                           for name, value in STANDARD_CHANGES.items()}
    bwd = base.with_(pass_="bwd", kernel="gradients")
    keys |= {"bwd": key(bwd)} | {name: key(bwd.with_(**{name: value})) for name, value in BWD_CHANGES.items()}
    assert len(set(keys.values())) == len(keys)
