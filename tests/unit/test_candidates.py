"""Candidate tiles: they all lower, nothing is dropped without a count, and the model keeps what timing found best."""
from __future__ import annotations

import dataclasses

import pytest
from candidates_kit import SMALL, found_for, spec_of
from sampling import one_in

from flashgen.codegen.explain import candidates as module
from flashgen.codegen.explain.candidates import (
    MAX_CANDIDATES,
    candidates,
    default_shapes,
    present_row,
    present_tiling,
    shapes_of,
    tilings,
)
from flashgen.codegen.explain.counts import Shape
from flashgen.codegen.families.registry import lower
from flashgen.codegen.plan import verify
from flashgen.codegen.spec.spec import Spec, Tile, load_specs, shipped_spec_paths, spec_path
from flashgen.codegen.target import TARGETS
from flashgen.errors import FlashgenError, PlanError, UnsupportedError

pytestmark = pytest.mark.slow


def shipped(family: str) -> list[Spec]:
    """One spec of every (target, head dims, mask, split): what the tile table tells apart."""
    specs = [spec for path in shipped_spec_paths() for spec in load_specs(path).specs if spec.family == family]
    return [spec for spec in specs if spec.dtype == "bf16" and spec.kv_layout == "dense" and not spec.pack_gqa
            and spec.pass_ == "fwd"]


def some(family: str) -> list[Spec]:
    """Of those, some for the targets with most and least shared memory: a grid takes half a second."""
    return one_in(6, [spec for spec in shipped(family) if spec.arch in ("sm_86", "sm_90", "sm_90a")])


@pytest.mark.parametrize("family", ["fa2", "fa3"])
def test_every_candidate_lowers_and_every_drop_is_counted(family: str) -> None:
    reasons = {*module._REFUSALS.values()}
    for spec in some(family):
        found = candidates(spec, SMALL)
        assert found.considered == len(found.kept) + sum(row.count for row in found.dropped)
        assert 0 < len(found.kept) <= MAX_CANDIDATES and len({c.spec for c in found.kept}) == len(found.kept)
        assert found.present in found.kept
        for candidate in found.kept:
            assert lower(candidate.spec) == candidate.plan
            verify(candidate.plan, TARGETS[spec.arch])
            assert candidate.tiling.applied_to(spec) == candidate.spec
            assert present_tiling(candidate.spec) == candidate.tiling  # each field is explicit
        predictions = [c.estimate.predicted for c in found.kept]
        assert predictions == sorted(predictions)
        for row in found.dropped:
            assert row.example and (row.reason in reasons or row.reason.startswith(("floor 25 %", "behind the"))), row


@pytest.mark.parametrize("family", ["fa2", "fa3"])
def test_the_present_row_is_of_the_grid(family: str) -> None:
    for spec in shipped(family):
        tiling = present_tiling(spec)
        assert tiling in set(tilings(spec)), f"{spec.variant}.{spec.arch}: {tiling} is timed, but not of the grid"
        implicit, explicit = lower(spec), lower(tiling.applied_to(spec))
        for name in ("constants", "smem", "roles", "launch", "flags", "barriers", "register_usage_level"):
            assert getattr(implicit, name) == getattr(explicit, name), name


def test_what_was_timed_ranks_within_the_limit() -> None:
    """The model must not cut off what measuring found to be the best."""
    measured = [spec for spec in [*shipped("fa2"), *shipped("fa3")]
                if (row := present_row(spec)).source.startswith("fastest") and not spec.window
                and row.head_dim_qk == spec.head_dim_qk]
    for spec in one_in(3, measured):
        found = candidates(spec, default_shapes(spec), 10**6)
        assert found.present is not None
        assert found.kept.index(found.present) < MAX_CANDIDATES, f"{spec.variant}.{spec.arch}"


def test_pruning_is_by_the_floor_and_the_limit_by_the_prediction() -> None:
    everything, few = found_for("fa3_fwd_bf16_d64", limit=10**6), found_for("fa3_fwd_bf16_d64", limit=7)
    best = min(c.estimate.floor for c in everything.kept)
    assert all(c.estimate.floor <= module.SLACK * best or c == everything.present for c in everything.kept)
    kept = {c.spec for c in everything.kept}
    left_out = 0
    for tiling in tilings(everything.spec):
        try:
            plan = lower(tiling.applied_to(everything.spec))
        except FlashgenError:
            continue
        if tiling.applied_to(everything.spec) not in kept:
            left_out += 1
            assert module.estimate(plan, everything.spec, SMALL).floor > module.SLACK * best
    assert left_out == sum(row.count for row in everything.dropped if row.reason.startswith("floor"))
    assert len(few.kept) == 7 and few.present in few.kept
    assert {c.spec for c in everything.kept[:6]} <= {c.spec for c in few.kept}
    assert any("behind the 7" in row.reason for row in few.dropped)


def test_what_the_spec_sets_stays_set() -> None:
    spec = spec_of("fa3_fwd_bf16_d128").with_(tile=Tile(m=128, n=96), stages=2)
    found = candidates(spec, SMALL)
    assert {(c.tiling.m, c.tiling.n, c.tiling.stages, c.tiling.warps) for c in found.kept} == {(128, 96, 2, 8)}
    assert len({c.tiling.own for c in found.kept}) > 1


def test_a_present_tile_that_does_not_fit_is_told() -> None:
    row = dataclasses.replace(present_row(spec_of("fa3_fwd_bf16_d256")), n=256)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "present_row", lambda spec: row)
        found = candidates(spec_of("fa3_fwd_bf16_d256"), SMALL)
    assert found.present is None and "registers" in found.present_error and found.kept
    assert found.considered == len(found.kept) + sum(dropped.count for dropped in found.dropped)


@pytest.mark.parametrize("name", ["fa2_bwd", "fa3_bwd"])
def test_a_pass_whose_table_decides_is_refused(name: str) -> None:
    """At once: no grid is tried whose every tile the spec's rules refuse."""
    for spec in one_in(100, load_specs(spec_path(name)).specs):
        with pytest.raises(PlanError, match="pass bwd takes no tile") as caught:
            candidates(spec, SMALL)
        assert caught.value.allowed == "pass fwd"


def test_nothing_fits() -> None:
    with pytest.raises(PlanError, match=r"none of .* tiles fits") as caught:
        candidates(spec_of("fa2_fwd_bf16_d256", "sm_86").with_(tile=Tile(m=256, n=256)), SMALL)
    assert "registers" in caught.value.details


def test_the_model_counts_what_its_docstring_says() -> None:
    spec = spec_of("fa3_fwd_bf16_d128")
    shape = Shape(1, 192 * 132, 4096, 1, 1)  # one query tile for each SM
    tile = dataclasses.replace(present_tiling(spec), m=192, n=64, warps=12)
    plan = lower(tile.applied_to(spec))
    units, idle, _ = module._clocks(plan, spec, shape)
    scores = 192 * 4096
    assert idle == 1.0
    assert units["tensor cores"] == 2 * scores * 256 / 4096
    assert units["exponential unit"] == scores / 16
    assert units["shared memory"] == 64 * 2 * (3 * (64 * 128 + 64 * 256) + 64 * 256) / 128
    late = module._clocks(plan, spec, dataclasses.replace(shape, seqlen_q=192 * 133))
    assert late[1] == pytest.approx(2 * 132 / 133)
    fa2 = spec_of("fa2_fwd_bf16_d128", "sm_90")
    plan = lower(present_tiling(fa2).applied_to(fa2))
    m, n, warps = plan.constant("BLOCK_M"), plan.constant("BLOCK_N"), plan.launch.threads // 32
    units, _, _ = module._clocks(plan, fa2, Shape(1, m * 132, 10 * n, 1, 1))
    q_reads = m * 128 if dict(plan.flags)["q_in_shared"] else 0
    assert units["shared memory"] == 10 * 2 * (warps * n * 256 + q_reads + n * 256) / 128


def test_problems() -> None:
    spec = spec_of("fa3_fwd_bf16_d128")
    assert [(s.batch, s.seqlen_q, s.num_heads_q) for s in default_shapes(spec)] == [
        (32, 512, 16), (8, 2048, 16), (2, 8192, 16)]
    assert default_shapes(spec_of("fa3_fwd_bf16_d64_window"))[0].window == (1024, 0)
    assert shapes_of(spec, ["batch=1 seqlen_q=64", "batch=1 seqlen_q=64"]) == (Shape(1, 64, 64),)
    for text, words in (("window=3,0", "window: true"), ("bach=1", "unknown size")):
        with pytest.raises(UnsupportedError, match="|".join((words, "has none"))):
            shapes_of(spec, [text])
