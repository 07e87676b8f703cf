"""The backward of fa3 on the emulator, all three kernels of a call: right, and without a fault of any kind."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flashgen.codegen.families.registry import lower, program_of
from flashgen.codegen.families.shared.launch import UNBOUNDED, Sizes
from flashgen.codegen.render import render
from flashgen.codegen.spec.spec import Spec
from flashgen.runtime.emulator.kernel import EmulatedKernel
from flashgen.runtime.emulator.schedule import POLICIES, Schedule, scheduled

KERNELS = ("preprocess", "gradients", "postprocess")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCE = {"bf16": 4e-3, "fp16": 5e-4}  # relative norm: P and dS are rounded to elements
WINDOW = (60, 20)
VARLEN = ((100, 130), (0, 0), (257, 300), (64, 0), (0, 77), (3, 129))


def spec_of(kernel: str, **fields: Any) -> Spec:
    return Spec(name="fa3_bwd", family="fa3", arch="sm_90a", kernel=kernel, lse=True, **{"pass": "bwd"}, **fields)


def visible(spec: Spec, seqlen_q: int, seqlen_kv: int, top_left: bool) -> Tensor:
    row = torch.arange(seqlen_q)[:, None] + (0 if top_left else seqlen_kv - seqlen_q)
    col = torch.arange(seqlen_kv)
    if spec.window:
        return (row - WINDOW[0] <= col) & (col <= row + WINDOW[1])
    return (col <= row) if spec.causal else (col < seqlen_kv).expand(seqlen_q, -1)


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Out and lse of one sequence [rows, heads, head_dim], in fp64; a row that sees nothing has 0 and -inf."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(len(q) // len(k), 0) for x in (k, v))
    scores = (q @ k.mT * scale).masked_fill(~seen, -torch.inf)
    some = seen.any(1)[:, None]
    probs = torch.where(some, scores, 0.0).softmax(-1) * some
    return (probs @ v).transpose(0, 1), scores.logsumexp(-1)


class Call:
    """Inputs of a call, and the gradients that are right."""

    def __init__(self, lengths: tuple[tuple[int, int], ...], heads: tuple[int, int] = (2, 1), *, top_left: bool = False,
                 tail: tuple[int, int] = (0, 0), seed: int = 0, scale: float | None = None, **fields: Any) -> None:
        self.fields = {"dtype": "bf16", "head_dim_qk": 128, "head_dim_v": 128, **fields}
        spec = spec_of("gradients", **self.fields)
        self.varlen, self.top_left = spec.kv_layout == "varlen", top_left
        generator, dtype = torch.Generator().manual_seed(seed), DTYPES[spec.dtype]
        rows = [sum(each) + extra for each, extra in zip(zip(*lengths, strict=True), tail, strict=True)]

        def random(kv: int, columns: int) -> Tensor:
            # Rows and heads lie apart, so that strides count.
            whole = torch.randn(rows[kv], heads[kv] + 1, columns + 8, generator=generator).to(dtype)
            return whole[:, :heads[kv], :columns]

        self.scale = spec.head_dim_qk ** -0.5 if scale is None else scale
        q, k = random(0, spec.head_dim_qk), random(1, spec.head_dim_qk)
        v, dout = random(1, spec.head_dim_v), random(0, spec.head_dim_v)
        exact = [x.double().requires_grad_() for x in (q, k, v)]
        out, lse = torch.zeros(dout.shape, dtype=dtype), torch.full((heads[0], rows[0]), -torch.inf)
        first_q = first_kv = 0
        for seqlen_q, seqlen_kv in lengths:
            of_q, of_kv = slice(first_q, first_q + seqlen_q), slice(first_kv, first_kv + seqlen_kv)
            own_out, own_lse = attend(exact[0][of_q], exact[1][of_kv], exact[2][of_kv],
                                      visible(spec, seqlen_q, seqlen_kv, top_left), self.scale)
            own_out.backward(dout[of_q].double())
            out[of_q], lse[:, of_q] = own_out.detach().to(dtype), own_lse.detach().float()
            first_q, first_kv = first_q + seqlen_q, first_kv + seqlen_kv
        for x, first in ((q, first_q), (dout, first_q), (k, first_kv), (v, first_kv)):
            x[first:] = torch.nan  # rows of no sequence
        self.wanted = {f"d{name}": x.grad for name, x in zip("qkv", exact, strict=True)}
        self.tensors = {"q": q, "k": k, "v": v, "out": out, "dout": dout, "lse": lse}
        self.batch, self.looks_at = len(lengths), dict[str, slice]()
        if self.varlen:
            for name, lens in zip(("cu_seqlens_q", "cu_seqlens_kv"), zip(*lengths, strict=True), strict=True):
                self.tensors[name] = torch.tensor([0, *torch.tensor(lens).cumsum(0)], dtype=torch.int32)
        else:
            for name in ("q", "k", "v", "out", "dout"):
                self.tensors[name] = self.tensors[name].unflatten(0, (self.batch, -1))
            self.tensors["lse"] = lse.unflatten(1, (self.batch, -1)).transpose(0, 1).contiguous()

    def solve(self, schedule: Schedule) -> dict[str, Tensor]:
        """dq, dk and dv by the three kernels."""
        given = self.tensors
        found = {f"d{name}": torch.full(given[name].shape, torch.nan, dtype=given[name].dtype) for name in "qkv"}
        tensors: dict[str, Tensor | None] = {**given, **found}
        axes = ("row", "head") if self.varlen else ("batch", "row", "head")
        strides = {f"{name}_{axis}_stride": tensors[name].stride(i) for i, axis in enumerate(axes)
                   for name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv")}
        sizes = Sizes(self.batch, given["q"].shape[-3], given["k"].shape[-3], given["q"].shape[-2],
                      given["k"].shape[-2], self.scale, self.top_left,
                      WINDOW if self.fields.get("window") else UNBOUNDED, strides)
        plans = {kernel: lower(spec_of(kernel, **self.fields)) for kernel in KERNELS}
        program = program_of(plans["preprocess"], sizes, 2, plans["gradients"], plans["postprocess"])
        tensors |= {buffer.name: torch.full(buffer.shape, torch.nan) for buffer in program.buffers}
        for step in program.steps:
            plan = plans[step.kernel]
            with scheduled(schedule):
                EmulatedKernel(plan, render(plan)).launcher(step)(tensors, filled=("dq_accum",))
        return found

    def poison_all_but(self, sequence: int) -> None:
        """What other sequences of a packed call hold becomes NaN, and their gradients are not looked at."""
        for name, bounds in (("q", "q"), ("k", "kv"), ("v", "kv"), ("out", "q"), ("dout", "q")):
            begin, end = self.tensors[f"cu_seqlens_{bounds}"][sequence:sequence + 2].tolist()
            own = self.tensors[name][begin:end].clone()
            self.tensors[name].fill_(torch.nan)[begin:end] = own
            if f"d{name}" in self.wanted:
                self.looks_at[f"d{name}"] = slice(begin, end)

    def check(self, schedule: Schedule) -> None:
        for name, x in self.solve(schedule).items():
            part = self.looks_at.get(name, slice(None))
            x, wanted = x[part], self.wanted[name].reshape(x.shape)[part]
            if not wanted.numel():
                continue
            size = max(wanted.norm().item(), 1e-3 * wanted.numel() ** 0.5)  # of gradients that are 0 but for rounding
            error = (x.double() - wanted).norm().item() / size
            assert error < TOLERANCE[self.fields["dtype"]], f"{name}: {error:.1e} of {self.fields}, {schedule}"


def dims(head_dim: int, **fields: Any) -> dict[str, Any]:
    return {"head_dim_qk": head_dim, "head_dim_v": head_dim, **fields}


MASKS = {"full": {}, "causal": {"causal": True}, "window": {"window": True}}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_schedule(head_dim: int, mask: str) -> None:
    """Several tiles of keys and queries, of which the last are cut; two query heads to a kv head."""
    call = Call(((300, 300),), **dims(head_dim, **MASKS[mask]))
    for seed, policy in enumerate(POLICIES):
        call.check(Schedule(policy, seed))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_packed_sequences(head_dim: int, mask: str) -> None:
    """Some without queries or keys; NaN in rows of no sequence after the last, whose dK and dV are 0. Then NaN in all
    sequences but one, which reaches none of its gradients."""
    call = Call(VARLEN, (4, 2), tail=(5, 150), kv_layout="varlen", dtype="fp16", **dims(head_dim, **MASKS[mask]))
    call.check(Schedule("random", 3))
    call.poison_all_but(2)
    call.check(Schedule("lazy", 4))


@pytest.mark.parametrize("top_left", [False, True])
def test_lengths_that_differ(top_left: bool) -> None:
    """Queries that see no key, and keys that no query sees."""
    lengths = ((150, 400), (400, 150), (1, 300), (300, 1), (64, 128))
    for number, pair in enumerate(lengths):
        mask = MASKS[("causal", "window")[number % 2]]
        call = Call((pair, pair), top_left=top_left, seed=number, **dims((128, 64)[number % 2], **mask))
        call.check(Schedule(POLICIES[number % len(POLICIES)], number))


@pytest.mark.parametrize("scale", [0.0, 1e-36, -0.2, 0.25])
def test_scales(scale: float) -> None:
    """lse is divided by the scale: by one of 0 it must not be, and the sign of a negative one must count. Some queries
    see no key."""
    call = Call(((150, 100),), scale=scale, **dims(64, causal=True))
    call.check(Schedule("random", 5))


@pytest.mark.parametrize("head_dims", [(96, 96), (72, 40), (8, 8), (32, 128), (128, 64)], ids=str)
def test_other_head_dims(head_dims: tuple[int, int]) -> None:
    call = Call(((200, 200),), (2, 2), head_dim_qk=head_dims[0], head_dim_v=head_dims[1], causal=True)
    call.check(Schedule("random", 1))
