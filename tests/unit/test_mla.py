"""flashgen.mla_decode on the host: what it refuses, which kernel it asks for, what it copies, and its torch ops.

A stand-in for the kernels notes what it is launched with and answers with the reference.
"""
from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from mla_kit import MLA_SPECS, decode, truth_of
from torch import Tensor

import flashgen
from flashgen.codegen.families.registry import fastest_first, lower, program_of
from flashgen.codegen.families.shared.launch import DecodeSizes, QuerySizes
from flashgen.codegen.plan import Plan
from flashgen.codegen.program import Step
from flashgen.errors import UnsupportedError
from flashgen.runtime.ops import torch_ops
from flashgen.runtime.ops.mla_decode.problem import MlaInputs, MlaProblem
from flashgen.runtime.ops.mla_decode.signature import MLA_DECODE, MlaSchedule
from flashgen.runtime.select import lookup
from flashgen.runtime.select.selector import Wanted
from flashgen.runtime.verify.compare import check, named

SPECS = {spec.variant: spec for spec in MLA_SPECS}
PROBLEM = MlaProblem((70, 0, 5), 4, 2, 64, causal=True)


@dataclass
class Stage:
    """Launches so far: (plan, values, tensors)."""

    launches: list[tuple[Plan, Mapping[str, Any], dict[str, Tensor | None]]] = field(default_factory=list)
    asked: list[Wanted] = field(default_factory=list)

    @property
    def variants(self) -> list[str]:
        return [plan.variant for plan, _, _ in self.launches]


@dataclass
class Kernel:
    plan: Plan
    stage: Stage
    num_sms: int = 4

    def launcher(self, step: Step) -> Callable[..., None]:
        named = {p.name for p in self.plan.params} - {m.name for m in self.plan.tensor_maps}
        assert named - {*self.plan.pointers} <= step.values.keys()

        def launch(tensors: dict[str, Tensor | None], filled: set[str]) -> None:
            self.stage.launches.append((self.plan, step.values, tensors))
            if self.plan.pass_ == "decode":
                answer(step.values, tensors)
            else:
                tensors["schedule"].zero_()  # type: ignore[union-attr]
        return launch


def answer(values: Mapping[str, Any], x: dict[str, Any]) -> None:
    scale, causal = values["scale_log2"] * math.log(2), values["masked_keys"] > 0
    inputs = MlaInputs(x["q"], x["kv"], x["seqlens"], x["page_table"], causal, scale, x["sink"])
    out, lse, _ = truth_of(inputs)
    x["out"].copy_(out)
    if x["lse"] is not None:
        x["lse"].copy_(lse if values["lse_counts_sink"] else truth_of(inputs.with_(sink=None))[1])


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    made = Stage()

    def kernel(wanted: Wanted, device_index: int) -> Kernel:
        made.asked.append(wanted)
        if wanted.spec:
            choice = lookup._matching(lookup.registry._open(wanted.spec), wanted, ["sm_90a"])
        else:
            choice = lookup.choose(wanted, ["sm_90a", "sm_90"]).spec
        return Kernel(lower(choice), made)

    monkeypatch.setattr(lookup.registry, "kernel", kernel)
    return made


def refused(x: MlaInputs, **more: Any) -> UnsupportedError:
    with pytest.raises(UnsupportedError) as caught:
        decode(x, **more)
    return caught.value


# ---- what is asked for

@pytest.mark.parametrize(("problem", "variant"), [
    (MlaProblem((9,), page_size=64), "mla_h100_bf16_d576v512_paged64"),
    (MlaProblem((9,), page_size=256, dtype="fp16"), "mla_h100_fp16_d576v512_paged64"),
    (MlaProblem((9,), page_size=1), "mla_h100_bf16_d576v512_paged1"),
    (MlaProblem((9,), page_size=16), "mla_h100_bf16_d576v512_paged1"),
    (MlaProblem((9,), page_size=96), "mla_h100_bf16_d576v512_paged1"),
    (MlaProblem((9,), page_size=None), "mla_h100_bf16_d576v512"),
    (MlaProblem((9,), page_size=None, head_dim_qk=512, dtype="fp16"), "mla_h100_fp16_d512"),
])
def test_each_cache_has_its_kernel(problem: MlaProblem, variant: str, stage: Stage) -> None:
    inputs = problem.make_inputs()
    out, lse = decode(inputs, return_lse=True)
    assert stage.variants == ["mla_h100_schedule", variant]
    check(named(out, lse), inputs)
    schedule, decoding = stage.launches
    assert decoding[2]["schedule"] is schedule[2]["schedule"] and schedule[2]["seqlens"] is inputs.seqlens_kv


def test_a_named_spec_is_what_runs_and_a_call_it_cannot_serve_is_refused(stage: Stage) -> None:
    inputs = PROBLEM.make_inputs()
    for spec, variant in ((SPECS["mla_h100_bf16_d576v512_paged1"], "mla_h100_bf16_d576v512_paged1"),
                          ("mla_h100", "mla_h100_bf16_d576v512_paged64")):
        decode(inputs, spec=spec)
        assert stage.variants[-1] == variant
    error = refused(inputs, spec=SPECS["mla_h100_bf16_d512"])
    assert "decode, bf16, head dims (576, 512), paged" in error.what and error.allowed == "mla_h100_bf16_d512"
    with pytest.raises(UnsupportedError, match="no variant of it serves"):
        decode(inputs, spec="fa2_fwd")


def test_only_hopper_has_decodes_and_attention_never_gets_one() -> None:
    wanted = Wanted("bf16", 576, 512, False, False, "paged", True, op="mla_decode", traits=(("page_size", 64),))
    assert lookup.choose(wanted, lookup.archs_for(90)).spec == SPECS["mla_h100_bf16_d576v512_paged64"]
    for cc in (80, 89, 100, 120):
        with pytest.raises(UnsupportedError, match=r"(?s)decode, bf16.*not flashmla: no shipped spec of it lists"):
            lookup.choose(wanted, lookup.archs_for(cc))
    with pytest.raises(UnsupportedError, match="not flashmla: its shipped specs do not list mla_decode"):
        lookup.choose(Wanted("bf16", 512, 512, False, False, "paged", True, op="mla_decode",
                             traits=(("page_size", 1),)), ["sm_90a"])
    assert not {spec.family for spec in SPECS.values()} & {family.name for family in fastest_first("attention")}


def test_pages_that_no_map_describes_are_gathered(stage: Stage) -> None:
    inputs = PROBLEM.make_inputs()
    one = inputs.kv_cache[:1].expand(4, -1, -1)
    decode(inputs.with_(kv_cache=one, page_table=torch.zeros(3, 2, dtype=torch.int32)))
    assert stage.variants[-1] == "mla_h100_bf16_d576v512_paged1"
    dense = MlaProblem((3, 3), 2, 1, None).make_inputs()
    assert "overlap" in refused(dense.with_(kv_cache=dense.kv_cache[:1].expand(2, -1, -1))).what


# ---- what a call becomes

def test_strides_and_sizes(stage: Stage) -> None:
    inputs = MlaProblem((70, 4, 5), 4, 2, 64, causal=True, sink=True).make_inputs()
    cache = inputs.kv_cache
    wide = torch.zeros(cache.shape[0], 2, 64, 1, 592, dtype=cache.dtype)[:, 1, :, :, :576].copy_(cache[:, :, None])
    out, lse = decode(inputs.with_(kv_cache=wide, softmax_scale=0.25), return_lse=True)
    check(named(out, lse), inputs.with_(softmax_scale=0.25))
    _, values, tensors = stage.launches[-1]
    assert values["kv_outer_stride"] == 2 * 64 * 592 and values["kv_row_stride"] == 592
    assert values["q_outer_stride"] == 8 * 576 and values["q_row_stride"] == 576 and values["q_rows"] == 8
    assert values["scale_log2"] == pytest.approx(0.25 / math.log(2)) and values["masked_keys"] == 1
    assert tensors["kv"] is wide and tensors["sink"] is inputs.sink and values["max_pages"] == 4
    decode(MlaProblem((3, 1), 1, 1, None).make_inputs())
    _, values, tensors = stage.launches[-1]
    assert (values["kv_outer"], values["kv_rows"], values["max_pages"]) == (2, 6, 0) and tensors["page_table"] is None
    assert tensors["lse"] is None and tensors["sink"] is None and values["masked_keys"] == 0


@pytest.mark.parametrize("change", ["head-major", "expanded", "strided columns", "misaligned", "table"])
def test_queries_and_tables_that_no_kernel_reads_are_copied(change: str, stage: Stage) -> None:
    inputs = PROBLEM.make_inputs()
    q, table = inputs.q, inputs.page_table
    assert table is not None
    if change == "head-major":
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
    elif change == "expanded":
        q = q[:1].expand(3, -1, -1, -1)
    elif change == "strided columns":
        q = torch.stack((q, q), -1)[..., 0]
    elif change == "misaligned":
        q = torch.cat((q.flatten()[:1], q.flatten()))[1:].view(q.shape)
    else:
        table = torch.cat((table, table), 1)[:, :table.shape[1]]
    changed = inputs.with_(q=q, page_table=table)
    out, lse = decode(changed, return_lse=True)
    check(named(out, lse), changed)
    _, values, tensors = stage.launches[-1]
    assert tensors["q"].is_contiguous() and tensors["page_table"].is_contiguous()  # type: ignore[union-attr]
    assert (tensors["q"] is q) is (change == "table") and values["q_row_stride"] == 576


def test_one_token_or_one_head_may_have_any_stride(stage: Stage) -> None:
    for shape, axis, stride in (((3, 1, 4), 2, 1152), ((3, 2, 1), 1, 1152)):
        q = torch.randn(*shape, 2, 576).bfloat16()[..., 0, :]
        inputs = MlaProblem((3, 2, 1), shape[2], shape[1], 64).make_inputs().with_(q=q)
        decode(inputs)
        assert stage.launches[-1][2]["q"] is q and q.stride(axis) == stride
        assert stage.launches[-1][1]["q_row_stride"] == stride


def test_a_schedule_is_kept_over_layers(stage: Stage) -> None:
    inputs = PROBLEM.make_inputs()
    schedule = flashgen.mla_schedule(inputs.seqlens_kv, 4, 2)
    assert (schedule.batch, schedule.num_heads_q, schedule.seqlen_q) == (3, 4, 2)
    assert len(schedule.rows) == stage.launches[0][1]["blocks"] and schedule.rows.dtype == torch.int32
    for _ in range(2):
        decode(inputs, schedule=schedule)
    assert stage.variants == ["mla_h100_schedule"] + ["mla_h100_bf16_d576v512_paged64"] * 2
    assert stage.launches[-1][2]["schedule"] is schedule.rows
    other = MlaProblem((70, 0, 5), 4, 1).make_inputs()
    assert "seqlen_q 2" in refused(other, schedule=schedule).what
    assert "type Tensor" in refused(inputs, schedule=schedule.rows).what
    error = refused(inputs, schedule=schedule._replace(rows=schedule.rows[:2]))
    assert f"int32 {tuple(schedule.rows.shape)}" in error.allowed


def test_one_length_for_all(stage: Stage) -> None:
    """B024: a number is the length of every request of the batch."""
    inputs = MlaProblem((5, 5, 5), 2, 1, 16).make_inputs()
    out = flashgen.mla_decode(inputs.q, inputs.kv_cache, 5, page_table=inputs.page_table)
    assert torch.equal(out, decode(inputs)) and stage.launches[-2][2]["seqlens"].tolist() == [5, 5, 5]  # type: ignore


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("empty", ["batch", "queries", "heads", "pages", "columns", "dense"])
def test_sizes_of_zero_need_no_kernel(empty: str, sink: bool, stage: Stage) -> None:
    x = MlaProblem((0, 0), 3, 2, None if empty == "dense" else 64, sink=sink).make_inputs()
    if empty == "batch":
        x = MlaProblem((), 3, 2, sink=sink).make_inputs()
    elif empty in ("queries", "heads"):
        x = x.with_(q=x.q[:, :0] if empty == "queries" else x.q[:, :, :0])
        x = x.with_(sink=x.sink[:x.q.shape[2]] if x.sink is not None else None)
    elif empty == "pages":
        x = x.with_(kv_cache=x.kv_cache[:0])
    elif empty == "columns":
        x = x.with_(page_table=x.page_table[:, :0] if x.page_table is not None else None)
    else:
        x = x.with_(kv_cache=x.kv_cache[:, :0])
    out, lse = decode(x, return_lse=True, out=x.q.new_full((*x.q.shape[:-1], 512), math.nan))
    assert not stage.launches and torch.equal(out, torch.zeros_like(out))
    expected = torch.full_like(lse, -math.inf) if x.sink is None else x.sink[:, None].expand_as(lse)
    assert torch.equal(lse, expected) and lse.shape == (x.q.shape[0], x.q.shape[2], x.q.shape[1])
    if sink:
        assert torch.isneginf(decode(x, return_lse=True, lse_counts_sink=False)[1]).all()


# ---- what is refused

def test_refusals_name_the_argument_and_what_is_allowed(stage: Stage) -> None:
    x = PROBLEM.make_inputs()
    table, dense = x.page_table, MlaProblem((3, 3, 3), 4, 2, None).make_inputs()
    assert table is not None
    cases: list[tuple[MlaInputs, dict[str, Any], str, str]] = [
        (x.with_(q=x.q[0]), {}, "q", "[batch, seqlen_q, num_heads_q, head_dim_qk], head_dim_qk 512 or 576"),
        (x.with_(q=x.q[..., :192]), {}, "q", "512 or 576"),
        (x.with_(kv_cache=x.kv_cache[..., :512]), {}, "kv_cache", "[num_pages, page_size, head_dim_qk]"),
        (x.with_(kv_cache=x.kv_cache[:, :, None].expand(-1, -1, 2, -1)), {}, "kv_cache", "dimension of 1"),
        (x.with_(kv_cache=x.kv_cache.half()), {}, "kv_cache", "one dtype for all: torch.bfloat16, torch.float16"),
        (x.with_(q=x.q.float(), kv_cache=x.kv_cache.float()), {}, "q", "torch.bfloat16"),
        (x.with_(q=x.q.repeat(1, 1, 33, 1)), {}, "num_heads_q", "1 to 128"),
        (x.with_(q=x.q.repeat(1, 5, 1, 1)), {}, "seqlen_q", "1 to 8"),
        (x.with_(seqlens_kv=x.seqlens_kv.long()), {}, "seqlens_kv", "int32 [batch], batch 3, on cpu"),
        (x.with_(seqlens_kv=x.seqlens_kv[:2]), {}, "seqlens_kv", "batch 3"),
        (x.with_(seqlens_kv=x.seqlens_kv.repeat(2)[::2]), {}, "seqlens_kv", "contiguous"),
        (x.with_(page_table=table.long()), {}, "page_table", "int32 [batch, max_pages]"),
        (x.with_(page_table=table[:1]), {}, "page_table", "batch 3"),
        (x.with_(page_table=None), {}, "kv_cache", "[batch, seqlen_kv, head_dim_qk]"),
        (dense.with_(kv_cache=dense.kv_cache[:2]), {}, "kv_cache", "[batch, seqlen_kv, head_dim_qk]"),
        (x.with_(kv_cache=torch.stack((x.kv_cache,) * 2, -1)[..., 0]), {}, "kv_cache", "16-byte aligned"),
        (x.with_(kv_cache=torch.zeros(9, 64, 577).bfloat16()[..., 1:]), {}, "kv_cache", "16-byte aligned"),
        (x.with_(softmax_scale=0.0), {}, "softmax_scale", "finite, above 0"),
        (x.with_(softmax_scale=math.nan), {}, "softmax_scale", "finite, above 0"),
        (x.with_(sink=torch.zeros(3)), {}, "sink", "float32 [num_heads_q] = [4]"),
        (x.with_(sink=torch.zeros(4).bfloat16()), {}, "sink", "float32"),
        (x, {"head_dim_v": 256}, "head_dim_v", "512"),
        (x, {"out": torch.zeros(3, 2, 4, 576).bfloat16()}, "out", "(3, 2, 4, 512)"),
        (x, {"out": torch.zeros(3, 4, 2, 512).bfloat16().transpose(1, 2)}, "out", "contiguous"),
        (x.with_(q=x.q.clone().requires_grad_()), {}, "q, kv_cache, sink", "requires_grad"),
            (x.with_(sink=torch.zeros(x.q.shape[2], requires_grad=True)), {}, "q, kv_cache, sink", "requires_grad"),
        (x.with_(q=x.q.to("meta")), {}, "q", "CUDA device, or on the CPU"),
    ]
    for inputs, more, where, allowed in cases:
        error = refused(inputs, **more)
        assert (error.where, allowed in error.allowed) == (where, True), str(error)
        assert not stage.launches
    with pytest.raises(UnsupportedError, match="num_heads_q is 129"):
        flashgen.mla_schedule(x.seqlens_kv, 129)
    with pytest.raises(UnsupportedError, match=r"seqlens_kv is torch\.int64"):
        flashgen.mla_schedule(x.seqlens_kv.long(), 4)


# ---- torch

@pytest.mark.parametrize("more", [{}, {"return_lse": True}, {"out": True}, {"out": True, "return_lse": True}], ids=str)
def test_ops_are_what_tracing_expects(more: dict[str, Any], stage: Stage) -> None:
    inputs = MlaProblem((70, 3), 4, 2, 64, causal=True, sink=True).make_inputs()
    plain = decode(inputs, **{**more, "out": None})

    @torch.compile(fullgraph=True, backend="eager")
    def compiled(q: Tensor, cache: Tensor, lengths: Tensor, out: Tensor | None) -> Any:
        schedule = flashgen.mla_schedule(lengths, 4, 2)
        return flashgen.mla_decode(q, cache, lengths, **inputs.keywords, schedule=schedule, **{**more, "out": out})

    out = inputs.q.new_full((2, 2, 4, 512), math.nan) if "out" in more else None
    found = compiled(inputs.q, inputs.kv_cache, inputs.seqlens_kv, out)
    for a, b in zip(found if "return_lse" in more else (found,), plain if "return_lse" in more else (plain,),
                    strict=True):
        assert torch.equal(a, b)
    options = (inputs.page_table, inputs.sink, None, True, 0.1, True, "")
    torch.library.opcheck(torch_ops.OPS["mla_decode"].lse, (inputs.q, inputs.kv_cache, inputs.seqlens_kv, *options))
    torch.library.opcheck(torch_ops.OPS["mla_schedule"].plain, (inputs.seqlens_kv, 4, 2))


def test_a_schedule_pickles(stage: Stage) -> None:
    schedule = flashgen.mla_schedule(PROBLEM.make_inputs().seqlens_kv, 4, 2)
    assert pickle.loads(pickle.dumps(schedule)).seqlen_q == 2 and flashgen.MlaSchedule is MlaSchedule


def test_every_pointer_is_a_tensor_of_the_call_or_a_buffer() -> None:
    sizes = DecodeSizes(QuerySizes(3, 2, 4), 9, 64, 3, {})
    for variant, spec in SPECS.items():
        if spec.pass_ == "decode":
            program = program_of(lower(spec), sizes, 4, lower(SPECS["mla_h100_schedule"]))
            names = {*MLA_DECODE.pointers, "out", "lse", *(buffer.name for buffer in program.buffers)}
            assert {*lower(spec).pointers} <= names, variant
            assert [step.kernel for step in program.steps] == ["schedule", "decode"]
            assert [step.kernel for step in program.given({"schedule"}).steps] == ["decode"]
