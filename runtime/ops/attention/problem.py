"""Problem: the shapes, mask and random numbers of one attention call. Inputs: the tensors it makes.

Frozen data, and no torch until there are tensors. A Problem's repr is a constructor call, so that a failure's text is
enough to repeat it.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from flashgen.codegen.dtype import DTYPES
from flashgen.codegen.mask import visible_pairs

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self

    from flashgen.codegen.spec.spec import Spec
    from flashgen.runtime.verify.compare import Truth
    from flashgen.runtime.verify.expression_mods import ExpressionMods


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

    @property
    def lengths(self) -> tuple[tuple[int, int], ...]:
        """(queries, keys) of each sequence."""
        if isinstance(self.seqlen_q, tuple) and isinstance(self.seqlen_kv, tuple):
            return tuple(zip(self.seqlen_q, self.seqlen_kv, strict=True))
        return ((self.seqlen_q, self.seqlen_kv),) * self.batch  # type: ignore[return-value]

    @property
    def visible(self) -> tuple[int, int]:
        """The window with what causal adds to it."""
        left, right = self.window
        return left, 0 if self.causal else right

    @property
    def head_dims(self) -> str:
        """As in `D128` or `D192/128`."""
        return f"D{_pair(self.head_dim_qk, self.head_dim_v)}"

    @property
    def shape(self) -> str:
        """As in `H32/8 B8 S2048`; varlen, `H16 B3 S1-16384`: the shortest and the longest sequence."""
        sides = [f"{min(side)}-{max(side)}" if isinstance(side, tuple) else str(side)
                 for side in (self.seqlen_q, self.seqlen_kv)]
        return f"H{_pair(self.num_heads_q, self.num_heads_kv)} B{self.batch} S{_pair(*sides)}"

    @property
    def label(self) -> str:
        """As in `D128 H16 B2 S8192 causal`."""
        words = [self.head_dims, self.shape, *(["varlen"] if self.varlen else []),
                 "causal" if self.causal else "full",
                 *(["window {},{}".format(*self.window)] if self.window != (-1, -1) else []),
                 *([self.dtype] if self.dtype != "bf16" else [])]
        return " ".join(words)

    @property
    def flops(self) -> int:
        """Of the (query, key) pairs that the mask leaves; a multiply-add counts as two."""
        pairs = sum(count * visible_pairs(*sides, self.visible) for sides, count in Counter(self.lengths).items())
        return 2 * self.num_heads_q * pairs * (self.head_dim_qk + self.head_dim_v)

    @property
    def bytes(self) -> int:
        """q, k, v and out once each."""
        rows = sum(queries * self.num_heads_q + keys * self.num_heads_kv for queries, keys in self.lengths)
        return rows * (self.head_dim_qk + self.head_dim_v) * DTYPES[self.dtype].bytes

    def make_inputs(self, device: str | torch.device = "cpu") -> Inputs:
        """N(0, 1) tensors on `device`; the same seed gives the same numbers on the same kind of device."""
        import torch

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


def _pair(a: object, b: object) -> str:
    return f"{a}" if a == b else f"{a}/{b}"


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
    mods: ExpressionMods | None = None  # what the expressions of the spec mean, and values for its parameters

    @property
    def heads_first(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v as views [batch, num_heads, seqlen, head_dim], as torch takes them."""
        return self.q.transpose(1, 2), self.k.transpose(1, 2), self.v.transpose(1, 2)

    @property
    def keywords(self) -> dict[str, Any]:
        """Everything but q, k and v, as `flashgen.attention` names it; and `reference`, without changes."""
        found = {name: getattr(self, name)
                 for name in ("causal", "window", "softmax_scale", "cu_seqlens_q", "cu_seqlens_kv")}
        return found if self.mods is None else {**found, "params": self.mods.params}

    @property
    def meaning(self) -> dict[str, Any]:
        """The same as `reference` and `lowprec` name it."""
        found = self.keywords
        if self.mods is not None:
            found["mods"] = self.mods
            del found["params"]
        return found

    def with_mods(self, spec: Spec, params: Mapping[str, Any] | None = None, seed: int = 0) -> Self:
        """The same call of a spec with expressions; values for its parameters are drawn where none are given."""
        from flashgen.runtime.verify.expression_mods import ExpressionMods, sample_params

        rows_q, rows_kv = self.q.shape[-3], self.k.shape[-3]
        sizes = {"num_heads_q": self.q.shape[-2], "num_heads_kv": self.k.shape[-2], "seqlen_q": rows_q,
                 "seqlen_kv": rows_kv, "total_q": rows_q, "total_kv": rows_kv,
                 "batch": self.q.shape[0] if self.cu_seqlens_q is None else len(self.cu_seqlens_q) - 1}
        drawn = sample_params(spec, sizes, self.q.device, seed)
        return self.with_(mods=ExpressionMods.of(spec, {**drawn, **(params or {})}))

    def with_(self, **changes: Any) -> Self:
        return replace(self, **changes)

    def truth(self) -> Truth:
        from flashgen.runtime.verify.reference import expected, lowprec, reference

        exact = reference(self.q, self.k, self.v, **self.meaning)
        return expected(*exact, lowprec(self.q, self.k, self.v, **self.meaning), self.q.shape[-1], self.softmax_scale)
