"""FlashAttention-1 on the emulator, forward and backward: right, and without a fault of any kind, in all schedules."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from emulated_backward import Call, backward_spec, check_backward, in_all_orders
from emulator_kit import distinct_plans, failures_in_turn, problems_of, report_of_fault, shipped, solve, with_nans_in_v
from large_scores import PATTERNS, inputs_of, judge
from sampling import in_turn, one_in

import flashgen
from flashgen.codegen.spec.spec import Spec, load_specs, spec_path
from flashgen.runtime.emulator.schedule import POLICIES, Schedule
from flashgen.runtime.ops.attention.op import IDENTITIES, run_poisoned
from flashgen.runtime.ops.attention.problem import Problem
from flashgen.runtime.select import lookup
from flashgen.runtime.verify.compare import check_bits
from flashgen.runtime.verify.gradients import gradients
from flashgen.runtime.verify.subject import Subject
from flashgen.runtime.verify.verify import verify_spec

FORWARD = [spec for spec, _ in distinct_plans("fa1")]
FULL, CAUSAL = (shipped(f"fa1_fwd_bf16_d64{mask}") for mask in ("", "_causal"))
BACKWARD = [spec for spec in load_specs(spec_path("fa1_bwd")).specs if spec.kernel == "gradients" and
            spec.arch == "sm_90"]


# ---- forward

@pytest.mark.parametrize("number, spec", [*enumerate(FORWARD)], ids=[spec.variant for spec in FORWARD])
def test_every_variant(number: int, spec: Spec) -> None:
    """fp16 kernels differ from bf16 ones in the instructions alone, so one problem of each mask does for them."""
    chosen = problems_of(spec)[::3 if spec.dtype == "fp16" else 1]
    failures = failures_in_turn(spec, number, chosen)
    assert not failures, "\n\n".join(failures[:3])


@pytest.mark.parametrize("causal", [False, True, "top_left"])
def test_lengths_at_the_edges_of_tiles(causal: bool | str) -> None:
    """Heads that share keys, more queries than keys, rows without a key, and keys that no query sees."""
    spec = CAUSAL if causal else FULL
    lengths = ((1, 1), (1, 129), (127, 127), (128, 128), (129, 257), (260, 7), (130, 300))
    for number, (seqlen_q, seqlen_kv) in enumerate(lengths):
        problem = Problem(1 + number % 2, seqlen_q, seqlen_kv, 2, 1 + number % 2, 64, 64, causal=causal, seed=number)
        solve(spec, problem.make_inputs(), Schedule(POLICIES[number % len(POLICIES)], number), str(problem))


@pytest.mark.parametrize("arch, head_dims", [("sm_90", (96, 96)), ("sm_80", (256, 256)), ("sm_90", (192, 128)),
                                             ("sm_86", (72, 40)), ("sm_86", (256, 256)), ("sm_90", (8, 8))], ids=str)
def test_other_head_dims_and_cards(arch: str, head_dims: tuple[int, int]) -> None:
    """With tiles of 32 and 64 keys, and with four warps."""
    for spec in (FULL, CAUSAL.with_(dtype="fp16")):
        spec = spec.with_(arch=arch, head_dim_qk=head_dims[0], head_dim_v=head_dims[1])
        problem = Problem(1, 130, 70, 2, 1, *head_dims, causal=spec.causal, dtype=spec.dtype)
        solve(spec, problem.make_inputs(), Schedule(), str(problem))


@pytest.mark.parametrize("spec", [FULL, CAUSAL], ids=lambda spec: spec.variant)
def test_nan_in_values(spec: Spec) -> None:
    """A non-finite value reaches the rows that see it, and no other."""
    for number, problem in enumerate(problems_of(spec)):
        for policy in in_turn(POLICIES, number):
            solve(spec, with_nans_in_v(problem.make_inputs()), Schedule(policy))


def test_nan_in_values_reaches_later_query_tiles() -> None:
    """Values that the first query tile must not see, and that the two behind it do: V comes back in between."""
    inputs = Problem(1, 330, 330, 1, 1, 64, 64, causal=True).make_inputs()
    v = inputs.v.clone()
    v[:, 100, :, ::2], v[:, 101, :, 1::2] = torch.nan, torch.inf
    found = solve(CAUSAL, inputs.with_(v=v), Schedule())
    assert bool(found[:, :100].isfinite().all()) and not bool(found[:, 101:].isfinite().any())


def test_nan_in_hidden_keys() -> None:
    """The scores of masked keys are -inf, whatever the product was."""
    inputs = Problem(1, 66, 66, 2, 1, 64, 64, causal=True).make_inputs()
    k, v = inputs.k.clone(), inputs.v.clone()
    k[:, -1], v[:, -1] = torch.nan, torch.inf
    found = solve(CAUSAL, inputs.with_(k=k, v=v), Schedule())
    check_bits(found[:, :-1], solve(CAUSAL, inputs, Schedule())[:, :-1], "rows that do not see the last key")


def test_rows_without_a_key() -> None:
    """Out is 0 and lse -inf, also in query tiles that nothing visits, and with no key at all."""
    for seqlen_kv in (5, 0):
        inputs = Problem(1, 140, seqlen_kv, 2, 2, 64, 64, causal=True).make_inputs()
        out, lse = run_poisoned(inputs, spec=CAUSAL)
        assert lse is not None and bool((out[:, :140 - seqlen_kv] == 0).all())
        assert bool(lse[..., :140 - seqlen_kv].isneginf().all()) and bool(lse[..., 140 - seqlen_kv:].isfinite().all())


@pytest.mark.parametrize("pattern", one_in(2, PATTERNS))
def test_far_scores(pattern: str) -> None:
    for spec in (FULL, CAUSAL.with_(dtype="fp16")):
        scores = PATTERNS[pattern](160, spec.dtype)
        inputs = inputs_of(spec, scores)
        judge(*run_poisoned(inputs, spec=spec), inputs, scores)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_many_visits_add_no_error(dtype: str) -> None:
    """O is divided by l, and multiplied by it again, 65 times."""
    problem = Problem(1, 17, 64 * 128 + 5, 1, 1, 64, 64, dtype=dtype)
    solve(FULL.with_(dtype=dtype), problem.make_inputs(), Schedule(), str(problem))


def test_strides_out_and_lse_change_no_bit() -> None:
    inputs = Problem(2, 70, 70, 2, 1, 64, 64, causal=True).make_inputs()
    plain = solve(CAUSAL, inputs, Schedule())
    wide = torch.full((*inputs.k.shape[:2], 2, *inputs.k.shape[2:]), torch.nan, dtype=inputs.k.dtype)
    wide[:, :, 0] = inputs.k
    heads = inputs.q.transpose(1, 2).contiguous().transpose(1, 2)
    check_bits(solve(CAUSAL, inputs.with_(q=heads, k=wide[:, :, 0]), Schedule()), plain, "strided")
    out = torch.full((2, 2, 70, 64), torch.nan, dtype=plain.dtype).transpose(1, 2)  # head-major
    assert flashgen.attention(inputs.q, inputs.k, inputs.v, causal=True, spec="fa1_fwd", out=out) is out
    check_bits(out, plain, "out given, lse not asked for")


@pytest.mark.parametrize("name", IDENTITIES)
def test_identities_hold_bit_by_bit(name: str) -> None:
    """Requests keep to themselves, strides do not count, and keys of the future are not seen."""
    IDENTITIES[name](Subject(CAUSAL, "cpu", emulated=True), Problem(2, 130, 130, 2, 1, 64, 64, causal=True))


def test_results_do_not_depend_on_the_schedule() -> None:
    inputs = replace(problems_of(CAUSAL)[0], seed=3).make_inputs()
    first = solve(CAUSAL, inputs, Schedule("eager"))
    for seed in range(3):
        check_bits(solve(CAUSAL, inputs, Schedule("random", seed, resident=1 + seed)), first, f"seed {seed}")


FAULTS = {
    "O is not rescaled": ("kernel", "raise_max(s, o, rows, p.scale_log2, 0.0f);",
                          "float none[1][2][4] = {};\n      raise_max(s, none, rows, p.scale_log2, 0.0f);"),
    "O is not multiplied by l": ("stored_fragments.cuh", "o[0][v][2 * h] *= rows.sum[0][h];", ""),
    "each lane adds l": ("stored_fragments.cuh", "threadIdx.x % 4 == 0 ? rows.sum[0][h] : 0.0f", "rows.sum[0][h]"),
    "m is not written": ("stored_fragments.cuh", "max[row + 8 * h] = rows.max[0][h];", ""),
    "V stays filtered": ("kernel", "sync_block();\n        load_values();", "sync_block();"),
    "the first queries are skipped": ("kernel", "m_tile = tiles.begin, stage", "m_tile = tiles.full_begin, stage"),
    "K comes too early": ("kernel", "sync_block();  // all warps are done with the tiles before", "//"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault: str) -> None:
    assert report_of_fault(CAUSAL, *FAULTS[fault])


# ---- backward

@pytest.mark.parametrize("number, spec", [*enumerate(BACKWARD)], ids=[spec.variant for spec in BACKWARD])
def test_gradients_of_every_variant(number: int, spec: Spec) -> None:
    """What `flashgen verify` runs: the whole call, with identities."""
    failures = [row.message for row in verify_spec([spec], emulate=True) if not row.ok]
    assert not failures, "\n\n".join(failures[:3])


@pytest.mark.parametrize("arch, head_dims, fields, calls", [
    ("sm_90", (64, 64), {}, (Call(((130, 200),)), Call(((64, 128), (64, 128)), 4, 2))),
    ("sm_90", (64, 64), {"causal": True}, (Call(((100, 330),), dlse=True), Call(((230, 100),)),
                                          Call(((230, 400),), top_left=True))),
    ("sm_90", (72, 72), {}, (Call(((130, 200),)),)),
    ("sm_80", (128, 128), {"causal": True, "dtype": "fp16"}, (Call(((100, 230),), dlse=True),)),
    ("sm_90", (192, 128), {}, (Call(((70, 100),)),)),
    ("sm_80", (256, 256), {"causal": True}, (Call(((100, 130),)),)),
    ("sm_86", (128, 128), {"causal": True}, (Call(((150, 90),)),)),
    ("sm_86", (200, 216), {"causal": True}, (Call(((150, 90),)),)),
    ("sm_120", (256, 232), {}, (Call(((70, 40),)),)),
], ids=lambda value: str(value) if isinstance(value, (tuple, dict)) and len(str(value)) < 60 else "")
def test_gradients(arch: str, head_dims: tuple[int, int], fields: dict[str, Any], calls: tuple[Call, ...]) -> None:
    """With one stage and two, four warps and eight, columns that warps share unevenly."""
    in_all_orders(backward_spec("fa1", arch, head_dims, **fields), calls)


def test_gradients_have_the_same_bits_in_all_schedules() -> None:
    """Also dq, which fa2's blocks add up in any order: here one block has all sums of a head."""
    spec, call = backward_spec("fa1", "sm_90", (64, 64), causal=True), Call(((150, 300),), 4, 2)
    first = check_backward(spec, call, Schedule("eager"), data=5)
    for schedule in (Schedule("lazy", 1), Schedule("random", 2), Schedule("random", 3, resident=1)):
        for name, found in check_backward(spec, call, schedule, data=5).items():
            check_bits(found, first[name], f"{name}, {schedule}")


@pytest.mark.parametrize("causal", [False, True])
def test_autograd_takes_the_backward_of_the_family(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the name of the forward spec, also where the same bits are asked for; attention_backward takes either name."""
    used: list[str] = []
    emulated = lookup._emulated
    monkeypatch.setattr(lookup, "_emulated", lambda spec: used.append(f"{spec.family} {spec.kernel}") or emulated(spec))
    lookup.registry._kernels.clear()
    make = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, rows, heads, 64, generator=make).bfloat16().requires_grad_()
               for rows, heads in ((70, 4), (140, 2), (140, 2)))
    out, lse = flashgen.attention(q, k, v, causal=causal, spec="fa1_fwd", return_lse=True, deterministic=True)
    dout = torch.randn(out.shape, generator=make).bfloat16()
    found = torch.autograd.grad(out, (q, k, v), dout)
    assert used == ["fa1 None", "fa1 preprocess", "fa1 gradients", "fa1 postprocess"]
    right = gradients(dout, q.detach(), k.detach(), v.detach(), causal=causal)
    for name, one, truth in zip("qkv", found, right, strict=True):
        assert (one.double() - truth).norm() < 1e-2 * truth.norm(), name
    for spec in ("fa1_fwd", "fa1_bwd"):
        tensors = (t.detach() for t in (q, k, v, out, lse))
        for one, other in zip(flashgen.attention_backward(dout, *tensors, causal=causal, spec=spec), found,
                              strict=True):
            check_bits(one, other, spec)
    assert all(name.startswith("fa1 ") for name in used)
