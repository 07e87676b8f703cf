"""Problem: the shapes, mask and random numbers of one attention call. Inputs: the tensors it makes, their right answer,
and the call itself.

Frozen data. A Problem's repr is a constructor call, so that a failure's text is enough to repeat it.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import flashgen
from flashgen.codegen.dtype import DTYPES
from flashgen.codegen.spec.spec import Spec
from flashgen.runtime.verify.changes import Changes, sample_params
from flashgen.runtime.verify.compare import Truth
from flashgen.runtime.verify.reference import expected, lowprec, reference
from flashgen.runtime.verify.subject import poisoned, same_tensor


@dataclass(frozen=True)
class Problem:
    """One call. Varlen: `seqlen_q` and `seqlen_kv` are tuples of `batch` lengths. Dense: two numbers."""

    batch: int
    seqlen_q: int | tuple[int, ...]
    seqlen_kv: int | tuple[int, ...]
    num_heads_q: int = 1
    num_heads_kv: int = 1
    head_dim_qk: int = 64
    head_dim_v: int = 64
    causal: bool | str = False          # False, True (bottom-right) or "top_left"
    window: tuple[int, int] = (-1, -1)  # keys left and right of the aligned diagonal; -1 is unbounded
    dtype: str = "bf16"                 # key of DTYPES
    softmax_scale: float | None = None  # None: head_dim_qk ** -0.5
    tail: int = 0                       # varlen: rows past the last sequence, NaN in q, k and v
    seed: int = 0

    def __post_init__(self) -> None:
        for lengths in (self.seqlen_q, self.seqlen_kv):
            if isinstance(lengths, tuple) != self.varlen or (isinstance(lengths, tuple) and len(lengths) != self.batch):
                raise ValueError(f"{self}: lengths are two numbers (dense) or two tuples of `batch` numbers (varlen)")
        if self.tail and not self.varlen:
            raise ValueError(f"{self}: only a varlen problem has a tail")

    @property
    def varlen(self) -> bool:
        return isinstance(self.seqlen_q, tuple)

    def make_inputs(self, device: str | torch.device = "cpu") -> Inputs:
        """N(0, 1) tensors on `device`; the same seed gives the same numbers on the same kind of device."""
        dtype = getattr(torch, DTYPES[self.dtype].torch_name)
        generator = torch.Generator(device).manual_seed(self.seed)

        def normal(lengths: int | tuple[int, ...], num_heads: int, head_dim: int) -> torch.Tensor:
            rows = (sum(lengths) + self.tail,) if isinstance(lengths, tuple) else (self.batch, lengths)
            x = torch.randn(*rows, num_heads, head_dim, device=device, generator=generator).to(dtype)
            if self.tail:
                x[-self.tail:] = float("nan")
            return x

        def prefix(lengths: int | tuple[int, ...]) -> torch.Tensor | None:
            if not isinstance(lengths, tuple):
                return None
            return torch.tensor((0, *lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)

        return Inputs(
            q=normal(self.seqlen_q, self.num_heads_q, self.head_dim_qk),
            k=normal(self.seqlen_kv, self.num_heads_kv, self.head_dim_qk),
            v=normal(self.seqlen_kv, self.num_heads_kv, self.head_dim_v),
            causal=self.causal, window=self.window, softmax_scale=self.softmax_scale,
            cu_seqlens_q=prefix(self.seqlen_q), cu_seqlens_kv=prefix(self.seqlen_kv),
        )


@dataclass(frozen=True)
class Inputs:
    """Arguments of one attention call. Shapes: contracts.md, Layouts."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    causal: bool | str = False
    window: tuple[int, int] = (-1, -1)
    softmax_scale: float | None = None
    cu_seqlens_q: torch.Tensor | None = field(default=None)
    cu_seqlens_kv: torch.Tensor | None = field(default=None)
    changes: Changes | None = None  # what the expressions of the spec mean, and values for its parameters

    @property
    def keywords(self) -> dict[str, Any]:
        """Everything but q, k and v, as `flashgen.attention` names it; and `reference`, without changes."""
        found = {name: getattr(self, name)
                 for name in ("causal", "window", "softmax_scale", "cu_seqlens_q", "cu_seqlens_kv")}
        return found if self.changes is None else {**found, "params": self.changes.params}

    @property
    def meaning(self) -> dict[str, Any]:
        """The same as `reference` and `lowprec` name it."""
        found = self.keywords
        if self.changes is not None:
            found["changes"] = self.changes
            del found["params"]
        return found

    def changed_by(self, spec: Spec, params: Mapping[str, Any] | None = None, seed: int = 0) -> Inputs:
        """The same call of a spec with expressions; values for its parameters are drawn where none are given."""
        rows_q, rows_kv = self.q.shape[-3], self.k.shape[-3]
        sizes = {"num_heads_q": self.q.shape[-2], "num_heads_kv": self.k.shape[-2], "seqlen_q": rows_q,
                 "seqlen_kv": rows_kv, "total_q": rows_q, "total_kv": rows_kv,
                 "batch": self.q.shape[0] if self.cu_seqlens_q is None else len(self.cu_seqlens_q) - 1}
        drawn = sample_params(spec, sizes, self.q.device, seed)
        return self.with_(changes=Changes.of(spec, {**drawn, **(params or {})}))

    def with_(self, **changes: Any) -> Inputs:
        return replace(self, **changes)

    def truth(self) -> Truth:
        exact = reference(self.q, self.k, self.v, **self.meaning)
        return expected(*exact, lowprec(self.q, self.k, self.v, **self.meaning), self.q.shape[-1], self.softmax_scale)


def run_poisoned(inputs: Inputs, *, spec: Spec | None = None, lse: bool = True,
                 out: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(out, lse or None) of flashgen.attention, into memory that held NaN before."""
    q, v = inputs.q, inputs.v
    out = poisoned(q.new_empty(*q.shape[:-1], v.shape[-1]) if out is None else out,
                   q.numel() // max(1, q.shape[-1]) if lse else 0)
    result: Any = flashgen.attention(q, inputs.k, v, **inputs.keywords, return_lse=lse, out=out, spec=spec)
    returned, returned_lse = result if lse else (result, None)
    return same_tensor(returned, out, "attention"), returned_lse
