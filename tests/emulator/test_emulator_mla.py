"""The flashmla kernels on the emulator, through flashgen.mla_decode: caches, head counts, lengths and schedules."""
from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from mla_kit import MLA_SPECS, decoded, solved, truth_of, with_last_keys, with_nans
from torch import Tensor

import flashgen
from flashgen.codegen.spec.spec import Spec
from flashgen.runtime.emulator.kernel import emulated_sms
from flashgen.runtime.emulator.schedule import POLICIES, Schedule, scheduled
from flashgen.runtime.ops.mla_decode.op import kept_schedule, layouts
from flashgen.runtime.ops.mla_decode.problem import MlaInputs, MlaProblem
from flashgen.runtime.verify.compare import check_bits
from flashgen.runtime.verify.subject import Subject

SPECS = {spec.variant: spec for spec in MLA_SPECS}
DECODES = [spec for spec in SPECS.values() if spec.pass_ == "decode"]
PAGE_SIZES: dict[int | None, tuple[int | None, ...]] = {64: (64, 128), 1: (1, 16, 32, 61), None: (None,)}


def problem_for(spec: Spec, lengths: tuple[int, ...], *sizes: int, page: int = 0, **more: Any) -> MlaProblem:
    """Of the spec's cache; `sizes`: num_heads_q, seqlen_q."""
    pages = PAGE_SIZES[spec.page_size]
    return MlaProblem(lengths, *sizes, page_size=pages[page % len(pages)], head_dim_qk=spec.head_dim_qk,
                      dtype=spec.dtype, **more)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("spec", DECODES, ids=lambda spec: spec.variant)
def test_shipped_variants(spec: Spec, policy: str) -> None:
    with scheduled(Schedule(policy, 3)):
        solved(problem_for(spec, (0, 1, 65, 200), 4, 2, causal=True, sink=True, page=POLICIES.index(policy)), spec=spec)


@pytest.mark.parametrize("heads", [1, 4, 8, 16, 24, 31, 32, 33, 64, 128])
def test_any_number_of_heads(heads: int) -> None:
    """B074: whole blocks of rows, ragged ones, and requests that several blocks of rows share."""
    seqlen_q = 2 if heads in (16, 33) else 1
    solved(MlaProblem((3, 130), heads, seqlen_q, causal=True, seed=heads))


@pytest.mark.parametrize("seqlen_q", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("causal", [False, True])
def test_new_tokens(seqlen_q: int, causal: bool) -> None:
    """B072: query i sees length - seqlen_q + 1 + i keys, which for short requests are none."""
    solved(MlaProblem((1, seqlen_q, 66, 0), 8, seqlen_q, causal=causal, sink=causal))


@pytest.mark.parametrize("page_size", [1, 2, 16, 32, 48, 61, 64, 128, 192, 256])
def test_pages_of_any_size(page_size: int) -> None:
    solved(MlaProblem((1, 63, 64, 130, 0), 3, 1, page_size, dtype="fp16" if page_size % 3 == 0 else "bf16"))


@pytest.mark.parametrize("sms", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("lengths", [(500,), (0, 0, 500, 0), (1, 300, 2, 3, 200, 4, 65), (64,) * 6, (0, 0, 0)], ids=str)
def test_schedules_of_any_size(lengths: tuple[int, ...], sms: int) -> None:
    """From one block with all requests to more blocks than tiles: several segments a block, cuts, merges."""
    with emulated_sms(sms), scheduled(Schedule("random", sms, resident=1 + sms % 4)):
        solved(MlaProblem(lengths, 4, 1, sink=len(lengths) == 1, seed=sms))


@pytest.mark.parametrize("policy", ["random", "lazy"])
@pytest.mark.parametrize("sms", [1, 2, 3, 5])
def test_every_phase_of_the_loop(sms: int, policy: str) -> None:
    """Segments of one to five tiles, after each other in every order of odd and even, and cut at odd places."""
    with emulated_sms(sms), scheduled(Schedule(policy, sms, resident=sms)):
        lengths = (1, 320, 129, 65, 257, 193, 64) if sms == 1 else (320 + 64 * sms,)
        solved(MlaProblem(lengths, 8, 2, causal=True, seed=sms))


@pytest.mark.parametrize("spec", ["mla_h100_fp16_d512", "mla_h100_bf16_d576v512_paged1"])
def test_cuts_of_other_caches(spec: str) -> None:
    with emulated_sms(5):
        solved(problem_for(SPECS[spec], (300, 0, 65), 16, 1, page=1), spec=SPECS[spec])


def test_two_blocks_of_rows_of_a_cut_request() -> None:
    with emulated_sms(6), scheduled(Schedule("lazy", 1, resident=6)):
        solved(MlaProblem((400, 1), 33, 3, causal=True))


@pytest.mark.parametrize(("lengths", "heads", "tokens", "sms", "rows"), [
    ((400, 1), 33, 3, 20, 32), ((64,), 16, 4, 8, 16), ((130, 0, 70), 31, 2, 33, 16), ((200,), 128, 1, 40, 16)])
@pytest.mark.parametrize("policy", ["random", "lazy"])
def test_blocks_of_fewer_rows(lengths: tuple[int, ...], heads: int, tokens: int, sms: int, rows: int, policy: str
                              ) -> None:
    """Where there are more blocks than the keys can use. A block leaves alone what lies past its rows."""
    problem = MlaProblem(lengths, heads, tokens, causal=tokens > 1, sink=heads == 31)
    with emulated_sms(sms), scheduled(Schedule(policy, sms, resident=sms)):
        records = flashgen.mla_schedule(problem.make_inputs().seqlens_kv, heads, tokens).rows
        assert records[0, 12] == rows  # block_rows of flashgen/segments.cuh
        solved(problem)


@pytest.mark.parametrize("scale", [0.005, 0.3, 1.0])
@pytest.mark.parametrize("growth", [-0.3, 0.3, 3.0])
def test_scores_that_grow_or_fall_along_the_keys(growth: float, scale: float) -> None:
    inputs = MlaProblem((333,), 4, 1, None, softmax_scale=scale).make_inputs()
    steps = torch.linspace(0, growth, 333).view(1, -1, 1) * torch.sign(inputs.q[:, 0, :1].float())
    cache = inputs.kv_cache.clone()
    cache[:, :333] = (cache[:, :333].float() + steps).to(cache.dtype)
    for sms in (1, 3):
        with emulated_sms(sms):
            decoded(inputs.with_(kv_cache=cache), f"growth {growth}")


# ---- what does not count, and what does

@pytest.mark.parametrize("special", [math.nan, math.inf])
@pytest.mark.parametrize("page_size", [64, 16, None])
def test_what_lies_past_the_end_does_not_count(page_size: int | None, special: float) -> None:
    """B021, B022: unused rows and pages, the table's tail."""
    inputs = MlaProblem((1, 65, 3), 4, 1, page_size).make_inputs()
    decoded(inputs.with_(kv_cache=inputs.kv_cache.nan_to_num(special)), "rows past the end")


@pytest.mark.parametrize("page_size", [64, 1, None])
def test_a_nan_reaches_the_rows_that_see_it(page_size: int | None) -> None:
    """In a value, and in the last key under a causal mask: the first token does not see it."""
    inputs = MlaProblem((70, 66, 3), 2, 2, page_size, causal=True).make_inputs()
    decoded(with_nans(inputs), "NaN inside")


@pytest.mark.parametrize("page_size", [64, 1, None])
@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan])
def test_no_other_row_notices(page_size: int | None, special: float) -> None:
    """What the last key holds: rows that do not see it keep their bits, those that do are NaN, be their score -inf."""
    inputs = MlaProblem((70, 65, 1), 4, 2, page_size, causal=True).make_inputs()
    clean, special_ = decoded(inputs), decoded(with_last_keys(inputs, special), judged=False)
    for found, expected, seen in zip(special_, clean, (lambda x: x[:, 1], lambda x: x[..., 1]), strict=True):
        assert seen(found).isnan().all()
        seen(found).copy_(seen(expected))
        check_bits(found, expected, "rows that do not see it")


def test_requests_without_keys_are_written() -> None:
    """B028: also beside others, and with a sink."""
    for sink, page_size in ((False, 64), (True, 64), (True, 16)):
        solved(MlaProblem((5, 9, 1, 3, 64, 0, 0, 0), 4, 1, page_size, sink=sink))
        solved(MlaProblem((0, 0), 70, 1, sink=sink))


@pytest.mark.parametrize("value", [math.inf, -math.inf, 100.0])
def test_sinks_at_the_edges(value: float) -> None:
    inputs = MlaProblem((70, 0), 4, 1, sink=True).make_inputs()
    decoded(inputs.with_(sink=torch.full((4,), value)), f"sink {value}")


def test_lse_with_and_without_the_sink() -> None:
    inputs = MlaProblem((200, 0), 4, 1, sink=True).make_inputs()
    out, lse = decoded(inputs)
    same, bare = decoded(inputs, judged=False, lse_counts_sink=False)
    check_bits(same, out, "out")
    torch.testing.assert_close(bare, truth_of(inputs.with_(sink=None))[1].float())
    torch.testing.assert_close(torch.logaddexp(bare, inputs.sink[:, None].expand_as(bare)), lse)  # type: ignore[index]


# ---- what changes no bit

def test_results_do_not_depend_on_the_order_of_blocks() -> None:
    problem = MlaProblem((300, 2, 0, 130), 16, 1)
    results: list[tuple[Tensor, Tensor]] = []
    with emulated_sms(5):
        for number, policy in enumerate((*POLICIES, "random", "random")):
            with scheduled(Schedule(policy, number, resident=5 - number % 3)):
                results.append(solved(problem))
    for out, lse in results[1:]:
        check_bits(out, results[0][0], "out")
        check_bits(lse, results[0][1], "lse")


@pytest.mark.parametrize("spec", [spec for spec in DECODES if spec.dtype == "bf16"], ids=lambda spec: spec.variant)
def test_identities(spec: Spec) -> None:
    """Those of `flashgen verify`: strides, other places of the pages, a schedule kept."""
    subject, problem = Subject(spec, "cpu", emulated=True), problem_for(spec, (66, 0, 3), 4, 2, causal=True, page=-1)
    layouts(subject, problem)
    kept_schedule(subject, problem)


def test_a_kept_schedule_serves_other_masks() -> None:
    inputs = MlaProblem((130, 2, 70), 4, 2).make_inputs()
    with emulated_sms(3):
        schedule = flashgen.mla_schedule(inputs.seqlens_kv, 4, 2)
        for changed in (inputs, inputs.with_(causal=True), inputs.with_(sink=torch.ones(4))):
            decoded(changed, schedule=schedule)


def test_out_keeps_its_neighbours() -> None:
    inputs: MlaInputs = MlaProblem((70, 1, 0), 33, 1).make_inputs()
    around = torch.full((5, 1, 33, 512), math.nan, dtype=torch.bfloat16)
    out = flashgen.mla_decode(inputs.q, inputs.kv_cache, inputs.seqlens_kv, **inputs.keywords, out=around[1:4])
    assert around[0].isnan().all() and around[4].isnan().all() and out.isfinite().all()


def test_lengths_past_the_table_stay_inside() -> None:
    """The rows are wrong, and no access strays: the emulator would object."""
    inputs = replace(MlaProblem((64, 65), 2, 1), seed=1).make_inputs()
    full = inputs.page_table[:, :2].clamp(0, inputs.kv_cache.shape[0] - 1)  # type: ignore[index]
    longer = inputs.with_(seqlens_kv=torch.tensor([1000, 65], dtype=torch.int32), page_table=full.contiguous())
    decoded(longer, judged=False)
