"""One mla_decode call as frozen data, the tensors it makes, their right answer in fp64, and the call itself.

The tensors are as hostile as the contract allows: pages in random order, NaN in all rows and pages that no request has,
and page ids past a request's end that no cache has.
"""
from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import flashgen
from flashgen.codegen.dtype import DTYPES
from flashgen.codegen.spec.spec import Spec
from flashgen.runtime.verify.compare import Truth
from flashgen.runtime.verify.reference import expected, lowprec, reference
from flashgen.runtime.verify.subject import poisoned, same_tensor

HEAD_DIM_V = 512
GARBAGE_IDS = (2147480000, -1)   # of pages, past a request's end
SPARE_PAGES, SPARE_COLUMNS, SPARE_ROWS = 2, 2, 3


@dataclass(frozen=True)
class MlaProblem:
    """`lengths`: keys of each request. `page_size` None: a dense cache."""

    lengths: tuple[int, ...]
    num_heads_q: int = 16
    seqlen_q: int = 1
    page_size: int | None = 64
    head_dim_qk: int = 576
    causal: bool = False
    sink: bool = False
    dtype: str = "bf16"                 # key of DTYPES
    softmax_scale: float | None = None  # None: head_dim_qk ** -0.5
    seed: int = 0

    def make_inputs(self, device: str | torch.device = "cpu") -> MlaInputs:
        """N(0, 1) tensors on `device`; the same seed gives the same numbers on the same kind of device."""
        dtype, generator = getattr(torch, DTYPES[self.dtype].torch_name), torch.Generator(device).manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device, dtype=torch.float32, generator=generator).to(dtype)

        q = normal(len(self.lengths), self.seqlen_q, self.num_heads_q, self.head_dim_qk)
        sink = 2 * torch.randn(self.num_heads_q, device=device, generator=generator) if self.sink else None
        if self.page_size is None:
            page_table, rows = None, max(self.lengths, default=0) + SPARE_ROWS
            cache = _normal_cache(len(self.lengths), rows, self.head_dim_qk, dtype, generator)
            for i, length in enumerate(self.lengths):
                cache[i, length:] = math.nan
        else:
            page_table, cache = self._pages(dtype, generator)
        seqlens = torch.tensor(self.lengths, dtype=torch.int32).to(device)
        return MlaInputs(q, cache, seqlens, page_table, self.causal, self.softmax_scale, sink)

    def _pages(self, dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        size = self.page_size or 1
        counts = [-(-length // size) for length in self.lengths]
        device, total = generator.device, sum(counts) + SPARE_PAGES
        cache = _normal_cache(total, size, self.head_dim_qk, dtype, generator)
        order = torch.randperm(total, generator=torch.Generator().manual_seed(self.seed)).int()
        cache[order[sum(counts):].long().to(device)] = math.nan
        table = torch.tensor(GARBAGE_IDS, dtype=torch.int32).repeat(len(counts), max(counts, default=0) + SPARE_COLUMNS)
        table = table[:, :max(counts, default=0) + SPARE_COLUMNS].contiguous()
        first = 0
        for i, (length, count) in enumerate(zip(self.lengths, counts, strict=True)):
            table[i, :count] = order[first:first + count]
            first += count
            if length % size:
                cache[int(table[i, count - 1]), length % size:] = math.nan
        return table.to(device), cache


def _normal_cache(pages: int, rows: int, columns: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """[pages, rows, columns] from N(0, 1), without its size in fp32 beside it."""
    cache = torch.empty(pages, rows, columns, dtype=dtype, device=generator.device)
    step = max(1, (1 << 28) // max(1, rows * columns))
    for first in range(0, pages, step):
        part = cache[first:first + step]
        part.copy_(torch.randn(part.shape, device=generator.device, generator=generator))
    return cache


@dataclass(frozen=True)
class MlaInputs:
    """Arguments of one call."""

    q: Tensor
    kv_cache: Tensor
    seqlens_kv: Tensor
    page_table: Tensor | None = None
    causal: bool = False
    softmax_scale: float | None = None
    sink: Tensor | None = None

    @property
    def keywords(self) -> dict[str, Any]:
        """Everything but q, kv_cache and seqlens_kv, as flashgen.mla_decode names it."""
        return {name: getattr(self, name) for name in ("page_table", "causal", "softmax_scale", "sink")}

    def with_(self, **changes: Any) -> MlaInputs:
        return replace(self, **changes)

    def keys(self, i: int) -> Tensor:
        """[length, head_dim_qk] of request i."""
        length = int(self.seqlens_kv[i])
        if self.page_table is None:
            return self.kv_cache[i, :length].reshape(length, self.kv_cache.shape[-1])
        pages = self.page_table[i, :-(-length // self.kv_cache.shape[1])].long()
        return self.kv_cache[pages].reshape(-1, self.kv_cache.shape[-1])[:length]

    def truth(self) -> Truth:
        """The references of attention, request by request; the sink, which no key of theirs has, takes its share after.
        """
        q, sink = self.q, self.sink
        out = torch.zeros(*q.shape[:-1], HEAD_DIM_V, dtype=torch.float64, device=q.device)
        plain = torch.zeros_like(out, dtype=q.dtype)
        lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -math.inf, dtype=torch.float64, device=q.device)
        for i in range(q.shape[0]):
            keys = self.keys(i)[None, :, None]
            options: dict[str, Any] = {"causal": self.causal, "softmax_scale": self.softmax_scale}
            one = (q[i:i + 1], keys, keys[..., :HEAD_DIM_V])
            (out[i:i + 1], lse[i:i + 1]), plain[i:i + 1] = reference(*one, **options), lowprec(*one, **options)
        if sink is not None:
            whole = torch.logaddexp(lse, sink.double()[:, None].expand_as(lse))
            part = torch.exp(lse - whole).masked_fill(lse == -math.inf, 0.0).transpose(1, 2)[..., None]
            out, lse, plain = out * part, whole, (plain * part).to(q.dtype)
        return expected(out, lse, plain, q.shape[-1], self.softmax_scale)


def run_poisoned(inputs: MlaInputs, *, spec: Spec | None = None, **more: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) of flashgen.mla_decode, into memory that held NaN before."""
    q = inputs.q
    out = poisoned(q.new_empty(*q.shape[:-1], HEAD_DIM_V), q.numel() // max(1, q.shape[-1]))
    returned, lse = flashgen.mla_decode(q, inputs.kv_cache, inputs.seqlens_kv, **inputs.keywords, return_lse=True,
                                        out=out, spec=spec, **more)
    return same_tensor(returned, out, "mla_decode"), lse
