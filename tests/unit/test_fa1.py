"""FlashAttention-1: what is refused, tiles, programs, bytes counted by hand, and whose gradients a call gets."""
from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

import flashgen
from flashgen.codegen.explain.check import check as check_spec
from flashgen.codegen.explain.counts import Shape
from flashgen.codegen.explain.explain import explain
from flashgen.codegen.families.fa1.explain import Fa1Explanation, count_visits
from flashgen.codegen.families.fa1.tiles import ACCUMULATORS, BWD_TILES, forward_tile
from flashgen.codegen.families.registry import lower, pass_of, program_of, targets_of
from flashgen.codegen.families.shared.launch import Sizes
from flashgen.codegen.mask import tile_counts
from flashgen.codegen.plan import Plan
from flashgen.codegen.program import Buffer
from flashgen.codegen.spec.spec import Spec, load_specs, spec_path
from flashgen.codegen.target import TARGETS
from flashgen.errors import SpecError, UnsupportedError
from flashgen.runtime.measure.grid import default_grid
from flashgen.runtime.ops.attention.bench import load_grid, variants_for
from flashgen.runtime.ops.attention_backward.call import OPERATION
from flashgen.runtime.select import lookup
from flashgen.runtime.select.differentiated import backward_specs
from flashgen.runtime.select.handles import handle_of, opened
from flashgen.runtime.select.selector import Wanted

SHIPPED = [spec for name in ("fa1_fwd", "fa1_bwd") for spec in load_specs(spec_path(name)).specs]
CALL = Spec(**{"name": "fa1_fwd", "family": "fa1", "pass": "fwd", "arch": "sm_80", "dtype": "bf16", "head_dim_qk": 64})
KERNELS = ("preprocess", "gradients", "postprocess")
DIMS = ((8, 8), (64, 64), (72, 40), (128, 128), (192, 128), (256, 256), (64, 256), (256, 8))


def backward(spec: Spec, kernel: str = "gradients") -> Spec:
    return Spec(**{**spec.model_dump(by_alias=True), "name": "fa1_bwd", "pass": "bwd", "kernel": kernel})


# ---- spec

def test_what_ships() -> None:
    assert {spec.variant for spec in SHIPPED} == {
        f"fa1_{kind}_{dtype}_d{dim}{mask}{kernel}" for dtype, dim, mask, (kind, kernel) in product(
            ("bf16", "fp16"), (64, 128), ("", "_causal"), (("fwd", ""), *(("bwd", f"_{name}") for name in KERNELS)))}
    assert {spec.arch for spec in SHIPPED} == {"sm_80", "sm_90"}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "window": ({"window": True}, "as first published"),
    "kv_layout": ({"kv_layout": "varlen"}, "a block has a head of one sequence"),
    "score": ({"score": "2 * score"}, "as first published"),
    "mask": ({"mask": "kv_pos <= q_pos"}, "as first published"),
    "sink": ({"sink": "per_head"}, "as first published"),
    "lse": ({"lse": False}, "a call leaves it out or not"),
    "deterministic": ({"deterministic": True}, "its results always have the same bits"),
    "batch_invariant": ({"batch_invariant": True}, "it always is"),
    "tile": ({"tile": {"m": 64, "n": 64}}, "its tiles follow from shared memory"),
    "stages": ({"stages": 3}, "its tiles follow from shared memory"),
    "head_dim_qk": ({"head_dim_qk": 576}, "head_dim_qk"),
    "dropout": ({"dropout": True}, "dropout"),
}


@pytest.mark.parametrize("field", REFUSED)
@pytest.mark.parametrize("spec", [CALL, backward(CALL)], ids=lambda spec: spec.pass_)
def test_what_is_refused(spec: Spec, field: str) -> None:
    changes, reason = REFUSED[field]
    with pytest.raises(SpecError, match=reason) as caught:
        Spec(**{**spec.model_dump(by_alias=True), **changes})
    assert caught.value.where == f"Spec.{field}" and caught.value.allowed


@pytest.mark.parametrize("asked", [{"window": (3, 0)}, {"dropout_p": 0.1}], ids=str)
def test_calls_that_it_does_not_serve(asked: dict[str, Any]) -> None:
    q = torch.zeros(1, 9, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match="no variant of it serves"):
        flashgen.attention(q, q, q, spec="fa1_fwd", **asked)


# ---- plans and programs

@pytest.mark.parametrize("arch", targets_of("fa1"))
def test_every_head_dim_has_tiles_that_fit(arch: str) -> None:
    """lower verifies the plan: shared memory, threads, registers of the launch bounds."""
    for qk, v in DIMS:
        tile = forward_tile(qk, v, TARGETS[arch])
        assert (tile.n + v) // 2 <= ACCUMULATORS and tile.m % 64 == 0
        for spec in (CALL, backward(CALL)):
            plan = lower(spec.with_(arch=arch, head_dim_qk=qk, head_dim_v=v))
            assert Plan.from_json(plan.to_json()) == plan
    assert all(BWD_TILES.find(arch, mask, *dims) for mask, dims in product(("full", "causal"), DIMS))


def test_tiles_have_as_many_keys_as_fit() -> None:
    assert [tuple(forward_tile(d, d, TARGETS["sm_80"])) for d in (64, 128, 192, 256)] == [
        (128, 128), (128, 128), (128, 64), (128, 32)]
    assert [tuple(forward_tile(d, d, TARGETS["sm_90"])) for d in (128, 192, 256)] == [(128, 128), (128, 128), (128, 64)]
    assert tuple(forward_tile(256, 256, TARGETS["sm_86"])) == (64, 32)


@pytest.mark.parametrize(("seqlen_q", "m_tiles"), [(1, 1), (128, 1), (129, 2), (1000, 8)])
def test_the_grid_is_the_heads(seqlen_q: int, m_tiles: int) -> None:
    """However long the sequences are; and scratch memory has whole tiles of queries."""
    strides = dict.fromkeys((f"{t}_{axis}_stride" for t in ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
                             for axis in ("batch", "row", "head")), 8)
    sizes = Sizes(2, seqlen_q, 777, 6, 3, 0.5, strides=strides)
    made = program_of(lower(CALL), sizes, 132)
    assert [(step.kernel, step.grid_x, step.threads) for step in made.steps] == [("fwd", 12, 256)]
    assert (made.steps[0].values["m_tiles"], made.steps[0].values["n_tiles"]) == (m_tiles, 7)
    rows = 128 * m_tiles
    assert made.buffers == (Buffer("o_accum", "f32", (12, rows, 64)), Buffer("row_max", "f32", (12, rows)),
                            Buffer("row_sum", "f32", (12, rows)))
    first, *others = (lower(backward(CALL, kernel)) for kernel in KERNELS)
    assert program_of(first, sizes, 132, *others).step("gradients").grid_x == 2 * 3  # heads of keys
    assert [dict(kernel)["kernel"] for kernel in pass_of(backward(CALL)).kernels] == list(KERNELS)


# ---- explain

@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(1, 1), (100, 130), (300, 700), (700, 300), (1024, 1024)], ids=str)
def test_visits_are_those_that_the_query_tiles_count(lengths: tuple[int, int], causal: bool) -> None:
    """The same pairs of tiles, counted along the other loop."""
    for tile in ((128, 128), (64, 32)):
        found = count_visits(Shape(1, *lengths, 1, 1), *tile, causal)
        assert found.tiles == tile_counts(*lengths, *tile, (-1, 0) if causal else (-1, -1)).visited
        assert found.keys == lengths[1] and found.rows <= found.tiles * tile[0]


def test_bytes_of_the_forward_by_hand() -> None:
    found = explain(CALL, batch=2, seqlen_q=300, seqlen_kv=200, num_heads_q=6, num_heads_kv=3)
    assert isinstance(found, Fa1Explanation)
    heads, visits = 12, 2 * 3  # key tiles of 128, query tiles of 128
    stored = heads * 128 * (visits + 3)  # and each query tile once more: written before, read after
    assert {name: (each.read, each.written) for name, each in found.moved.items()} == {
        "K and V": (heads * 200 * 128 * 2, 0), "Q": (heads * 2 * 300 * 64 * 2, 0),
        "O, fp32": (stored * 64 * 4, stored * 64 * 4), "m and l": (stored * 8, stored * 8),
        "out and lse": (0, heads * 300 * (64 * 2 + 4))}
    assert (found.visits, found.blocks, found.scratch_bytes) == (heads * visits, heads, heads * 384 * (64 + 2) * 4)
    assert found.bytes_once == heads * 300 * (2 * 64 * 2 + 4) + 2 * 3 * 200 * 128 * 2
    assert found.bytes_by_query == heads * 300 * (2 * 64 * 2 + 4) + heads * 3 * 200 * 128 * 2
    assert (found.flops, found.flops_issued) == (2 * heads * 300 * 200 * 128, 2 * heads * visits * 128 * 128 * 128)


def test_bytes_of_the_backward_by_hand() -> None:
    for kernel in KERNELS:
        found = explain(backward(CALL.with_(causal=True), kernel), batch=1, seqlen_q=200, num_heads_q=4, num_heads_kv=2)
        assert isinstance(found, Fa1Explanation)
        visits, rows = 4 * (4 + 2), 4 * (200 + 72)  # key tiles of 128, the second seen from query 128; tiles of 64
        stored, tensor, kv = 4 * 256, 4 * 200 * 64 * 2, 2 * 200 * 64 * 2
        assert {name: (each.read, each.written) for name, each in found.moved.items()} == {
            "Q, dO, lse and delta": (rows * 128 * 2 + visits * 64 * 8, stored * 8),
            "dQ, fp32": ((visits * 64 + stored) * 256, (visits * 64 + stored) * 256),
            "all else, once": (2 * tensor + 4 * 200 * 4 + 2 * kv, tensor + 2 * kv)}
        assert (found.visits, found.blocks, found.bytes_by_query) == (visits, 2, 0)
        assert found.flops == 2 * 4 * (200 * 201 // 2) * 5 * 64


@pytest.mark.parametrize("kernel", [None, *KERNELS])
def test_explain_and_check_show_a_whole_call(kernel: str | None) -> None:
    spec = CALL if kernel is None else backward(CALL, kernel)
    found = explain(spec)
    lines = str(found).splitlines()
    assert len(lines) <= 50 and max(map(len, lines)) <= 120
    assert set(found.to_json()["moved"]) == set(found.moved)  # type: ignore[attr-defined]
    if kernel is None:
        tiles = check_spec([CALL.with_(causal=True)], seqlen_q=256).tiles
        assert tiles is not None and len(tiles.cells) == 2


@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
def test_its_grid_has_a_variant_for_each_case(pass_: str) -> None:
    specs = [spec for spec in SHIPPED if spec.pass_ == pass_]
    cases = load_grid(default_grid("fa1", pass_))
    assert {case.head_dim_qk for case in cases} == {64, 128}
    for case in cases:
        [spec] = variants_for(case, specs, ["sm_90a", "sm_90"], 132)
        assert spec.kernel in (None, KERNELS[0], "gradients") and spec.causal == case.causal


# ---- whose gradients a call gets

def backward_of(spec: Any, emulated: bool = False, deterministic: bool = False) -> set[str]:
    """Families of the kernels that a call with this forward spec may take for its gradients."""
    traits: tuple[tuple[str, Any], ...] = (("kernel", "preprocess"), *((("deterministic", True),) * deterministic))
    wanted = Wanted("bf16", 64, 64, False, False, "dense", True, op=OPERATION.signature.name, traits=traits)
    handle = handle_of(spec)
    families = lookup._families_for(opened(handle), wanted.op, emulated)
    kinds = lookup._kinds_of(wanted, ["sm_90a", "sm_90"], families)
    return {one.family for one in backward_specs(handle, opened(handle), kinds, wanted.op)}


@pytest.mark.parametrize("emulated", [False, True])
def test_a_forward_spec_names_its_backward(emulated: bool) -> None:
    """Of families that serve by name alone; the others say nothing of gradients, and never get these."""
    for deterministic in (False, True):
        assert backward_of("fa1_fwd", emulated, deterministic) == {"fa1"}
        assert backward_of(CALL.with_(arch="sm_90"), emulated, deterministic) == {"fa1"}
    assert backward_of("fa1_bwd", emulated) == {"fa1"}
    assert "fa1" not in backward_of(flashgen.variant("2.0 * score"), emulated)
    assert "fa1" not in backward_of(CALL.with_(name="fa2_fwd", family="fa2", arch="sm_90"), emulated)
