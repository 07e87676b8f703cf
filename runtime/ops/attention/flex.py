"""The GPU side of variants.py: values for parameters, our calls, and FlexAttention as a person would write it.

`python -m flashgen.runtime.ops.attention.flex GRID NAME` compiles FlexAttention for one variant of a grid and ends:
several of these at once fill torch's cache of compiled kernels, so that the timing process does not wait for each.
"""
from __future__ import annotations

import functools
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flashgen.codegen.expr.evaluate import evaluate
from flashgen.codegen.expr.tree import names_of
from flashgen.codegen.spec.spec import Spec, load_specs, spec_path
from flashgen.errors import SpecError, VerifyError
from flashgen.runtime.measure.bench import Call, Device, Peer, Refused
from flashgen.runtime.ops.attention import timed
from flashgen.runtime.ops.attention.problem import Inputs
from flashgen.runtime.ops.attention.timed import AttentionJob, compiled_flex
from flashgen.runtime.ops.attention.variants import NO_MASK, VariantCase, load_variants
from flashgen.runtime.verify.expression_mods import BlockOffset, ExpressionMods

ROWS_AT_ONCE = 1024        # of a mask whose pairs are counted
PROCESSES = 8              # that compile FlexAttention at once
AGREE = 0.03               # absolute, and relative to the larger: a few roundings to bf16
_Mod = Callable[..., Any]


# -- values


def drawn(case: VariantCase, device: str | torch.device) -> dict[str, Any]:
    """A value for each parameter of the case. The same for each call."""
    found: dict[str, Any] = {}
    for name, value in case.values.items():
        if not isinstance(value, str):
            found[name] = value
            continue
        kind, _, number = value.partition(" ")
        if kind not in _DRAW:
            raise SpecError(f"{name} is {value!r}", where=case.name, allowed=", ".join(_DRAW))
        found[name] = _DRAW[kind](case, float(number or 0)).to(device)
    return found


def _slopes(case: VariantCase, _: float) -> Tensor:
    heads = case.problem.num_heads_q
    return torch.tensor([2.0 ** (-8 * (head + 1) / heads) for head in range(heads)])


def _documents(case: VariantCase, mean: float) -> Tensor:
    """Ids [batch, keys] of documents whose lengths are exponential with this mean, but 16 at least."""
    batch, keys = case.problem.batch, case.problem.lengths[0][1]
    generator = torch.Generator().manual_seed(0)
    ids = torch.empty(batch, keys, dtype=torch.int32)
    for row in ids:
        lengths = torch.empty(keys // 16 + 1).exponential_(1 / mean, generator=generator).clamp(min=16).long()
        row.copy_(torch.repeat_interleave(torch.arange(len(lengths)), lengths)[:keys]
                  if int(lengths.sum()) >= keys else torch.zeros(keys))
    return ids


def _prefix(case: VariantCase, part: float) -> Tensor:
    return torch.full((case.problem.batch,), int(part * case.problem.lengths[0][1]), dtype=torch.int32)


_DRAW: dict[str, Callable[[VariantCase, float], Tensor]] = {"slopes": _slopes, "documents": _documents,
                                                            "prefix": _prefix}

# -- FlexAttention: (score_mod or None, mask_mod) of the values


def _causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return kv <= q


def _flex_window(values: Mapping[str, Any]) -> tuple[_Mod | None, _Mod]:
    window = values["window"]
    return None, lambda b, h, q, kv: (kv <= q) & (q - kv < window)


def _flex_softcap(values: Mapping[str, Any]) -> tuple[_Mod | None, _Mod]:
    cap = values["softcap"]
    return lambda score, b, h, q, kv: cap * torch.tanh(score / cap), _causal


def _flex_alibi(values: Mapping[str, Any]) -> tuple[_Mod | None, _Mod]:
    slope = values["slope"]
    return lambda score, b, h, q, kv: score - slope[h] * (q - kv), _causal


def _flex_document(values: Mapping[str, Any]) -> tuple[_Mod | None, _Mod]:
    doc = values["doc"]
    return None, lambda b, h, q, kv: (kv <= q) & (doc[b, q] == doc[b, kv])


def _flex_prefix(values: Mapping[str, Any]) -> tuple[_Mod | None, _Mod]:
    prefix = values["prefix"]
    return None, lambda b, h, q, kv: (kv <= q) | (kv < prefix[b])


MODS: dict[str, Callable[[Mapping[str, Any]], tuple[_Mod | None, _Mod]]] = {
    "causal": lambda values: (None, _causal), "sliding_window": _flex_window, "softcap": _flex_softcap,
    "alibi": _flex_alibi, "document": _flex_document, "prefix_lm": _flex_prefix}


def flex(case: VariantCase, device: str = "cuda", made: list[float] | None = None) -> Callable[[Inputs], Tensor]:
    if case.flex not in MODS:
        raise Refused(f"no score_mod and mask_mod are written down for {case.flex or case.name}")
    score_mod, mask_mod = MODS[case.flex](drawn(case, device))
    batch = case.problem.batch if case.flex in ("document", "prefix_lm") else None
    return compiled_flex(case.problem, mask_mod, device, score_mod, batch, made)


# -- a case on the device


class VariantJob(AttentionJob):
    """`made`: milliseconds that the block mask of FlexAttention took to make."""

    def __init__(self, case: VariantCase, spec: Spec | None, inputs: Sequence[tuple[Inputs, Tensor]]) -> None:
        super().__init__(case, spec, inputs)
        self.made: list[float] = []

    def options(self) -> dict[str, Any]:
        return {"spec": self.spec, "params": drawn(self.case, self.first.device)} if self.spec else {}

    def visible_pairs(self) -> int:
        return visible_pairs(self.case, drawn(self.case, self.first.device), self.first.device)


job = VariantJob


def inputs(device: Device, case: VariantCase, spec: Spec | None) -> list[tuple[Inputs, Tensor]]:
    return timed.inputs(device, case.problem, spec)


def find(peer: str) -> Peer:
    """FlexAttention, or our own built-in mask. Refused says what is missing."""
    if peer == "flex":
        timed.find(peer)

    def start(job: VariantJob) -> Sequence[Call]:
        """Refused for a case that the peer does not serve, or answers otherwise."""
        if peer == "flex":
            attend = flex(job.case, str(job.first.device), job.made)
            calls: list[Call] = [functools.partial(attend, x) for x in job.inputs]
        elif job.case.built_in is None:
            raise Refused(NO_MASK)
        else:
            calls = job.calls(job.case.built_in)
        result: Any = calls[0]()
        torch.cuda.synchronize()
        found = (result.transpose(1, 2) if peer == "flex" else result).float()
        if not torch.allclose(found, job.first.float(), atol=AGREE, rtol=AGREE):
            raise Refused(f"its result is up to {(found - job.first.float()).abs().max().item():.3g} from ours")
        return calls
    return Peer(start)


def visible_pairs(case: VariantCase, values: Mapping[str, Any], device: str | torch.device) -> int:
    """(query, key) pairs that the mask leaves, over all heads and sequences."""
    problem, (rows, keys) = case.problem, case.problem.lengths[0]
    mods = ExpressionMods.of(case.spec, values) if case.spec else ExpressionMods()
    # Heads are looked at one by one where the mask names them, else once.
    by_head = mods.mask is not None and bool({"head_q", "head_kv"} & names_of(mods.mask).keys())
    heads = problem.num_heads_q if by_head else 1
    total = 0
    for first in range(0, rows, ROWS_AT_ONCE):
        count = min(ROWS_AT_ONCE, rows - first)
        scores = torch.empty(1, device=device).expand(problem.batch, heads, 1, count, keys)
        env = mods.env(BlockOffset(rows, keys, first_row=first), scores)
        seen = torch.ones((1, 1, 1, 1, 1), dtype=torch.bool, device=device)
        if problem.causal:
            seen = seen & (env["kv_pos"] <= env["q_pos"])
        if mods.mask is not None:
            seen = seen & evaluate(mods.mask, env, torch)
        total += int(seen.expand_as(scores).sum())
    return total * (problem.num_heads_q // heads)


# -- compiling ahead


def warm(cases: Sequence[VariantCase], peers: Sequence[str]) -> None:
    """Compiles ours in parallel, and beside that FlexAttention, into the caches."""
    from flashgen.runtime.compile.build import build_specs

    running = _flex_processes(cases) if "flex" in peers else []
    specs = [case.spec for case in cases if case.spec is not None] + [
        spec for spec in load_specs(spec_path("fa3_fwd")).specs for case in cases
        if (spec.dtype, spec.head_dim_qk, spec.kv_layout) == (case.problem.dtype, case.problem.head_dim_qk, "dense")]
    failed = [result.error for result in build_specs(list(dict.fromkeys(specs))) if result.error]
    for process in running:
        process.wait()
    if failed:
        raise VerifyError(failed[0]["what"], where=failed[0]["where"], details=failed[0]["details"])


def _flex_processes(cases: Sequence[VariantCase]) -> list[subprocess.Popen[bytes]]:
    """One for each way that FlexAttention is used, PROCESSES at most; what they leave out compiles later."""
    each = {case.flex: case for case in cases if case.flex in MODS}
    command = [sys.executable, "-m", "flashgen.runtime.ops.attention.flex"]
    return [subprocess.Popen([*command, case.grid, case.name], stdout=subprocess.DEVNULL)
            for case in list(each.values())[:PROCESSES]]


def compile_flex(grid: str, name: str) -> None:
    start = time.monotonic()
    for case in load_variants(grid):
        if case.name == name:
            x = case.problem.make_inputs("cuda")
            flex(case)(x)
            torch.cuda.synchronize()
            print(f"flex for {case.label}: {time.monotonic() - start:.1f} s after the imports", file=sys.stderr)


if __name__ == "__main__":
    compile_flex(*sys.argv[1:3])
