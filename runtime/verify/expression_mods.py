"""What a spec's expressions mean for the reference: the same trees, evaluated by torch on all scores of a block."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flashgen.codegen.expr.evaluate import evaluate
from flashgen.codegen.expr.tree import Expr, ScalarParam
from flashgen.codegen.spec.spec import Spec


@dataclass(frozen=True)
class ExpressionMods:
    """`params` holds a value for each parameter without a default, and the sink."""

    score: Expr | None = None
    mask: Expr | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    sink: bool = False
    normalized: bool = True
    top_left: bool = False

    @classmethod
    def of(cls, spec: Spec, params: Mapping[str, Any] | None = None) -> ExpressionMods:
        trees = spec.expressions
        defaults = {p.name: p.default for p in trees.params if isinstance(p, ScalarParam) and p.default is not None}
        return cls(trees.score, trees.mask, dict(params or {}), defaults, spec.sink == "per_head",
                   spec.normalize == "softmax", spec.align == "top_left")

    @property
    def values(self) -> dict[str, Any]:
        """Of all parameters, by name."""
        return {**self.defaults, **self.params}

    def env(self, at: BlockOffset, scores: Tensor) -> dict[str, Any]:
        """For scores [batch, head_kv, group, rows, keys]."""
        def axis(count: int, dim: int, first: int = 0) -> Tensor:
            return torch.arange(first, first + count, dtype=torch.int32, device=scores.device).reshape(
                [count if i == dim else 1 for i in range(5)])
        batch, heads_kv, group, rows, keys = scores.shape
        head_kv = axis(heads_kv, 1)
        diagonal = 0 if self.top_left or at.top_left else at.seqlen_kv - at.seqlen_q
        return {**self.values, "score": scores, "q_pos": axis(rows, 3, at.first_row + diagonal),
                "kv_pos": axis(keys, 4), "batch": axis(batch, 0, at.first_batch),
                "head_kv": head_kv, "head_q": head_kv * group + axis(group, 2), "seqlen_q": at.seqlen_q,
                "seqlen_kv": at.seqlen_kv, "q_first": diagonal, "q_begin": at.q_begin, "kv_begin": at.kv_begin}

    def score_mod(self, at: BlockOffset, scores: Tensor, dtype: str) -> Tensor:
        """The scores after the expression, which is evaluated in `dtype`."""
        if self.score is None:
            return scores
        found: Tensor = evaluate(self.score, self.env(at, scores), torch, dtype)
        return found.to(scores.dtype).expand_as(scores)

    def mask_mod(self, at: BlockOffset, scores: Tensor, mask: Tensor) -> Tensor:
        """`mask`, and what the expression hides besides."""
        if self.mask is None:
            return mask
        found: Tensor = mask & evaluate(self.mask, self.env(at, scores), torch, "float64")
        return found.expand_as(scores)


@dataclass(frozen=True)
class BlockOffset:
    """Which part of a call a block of scores is."""

    seqlen_q: int
    seqlen_kv: int
    first_batch: int = 0
    first_row: int = 0
    q_begin: int = 0
    kv_begin: int = 0
    top_left: bool = False


def sample_params(spec: Spec, sizes: Mapping[str, int], device: str | torch.device = "cpu",
                  seed: int = 0) -> dict[str, Any]:
    """A value for each parameter that a kernel is verified with: numbers near their defaults but no larger than a few
    tiles, tensors that are random. `sizes` gives the dims."""
    generator = torch.Generator(device).manual_seed(seed)
    found: dict[str, Any] = {}
    for param in spec.expressions.params:
        if isinstance(param, ScalarParam):
            value = {"int": 37, "float": 0.75, "bool": True}[param.type] if param.default is None else param.default
            found[param.name] = min(value, 37 + seed % 64) if param.type == "int" else value
            continue
        shape = [dim if isinstance(dim, int) else sizes[dim] for dim in param.shape]
        if param.dtype == "float32":
            found[param.name] = torch.randn(shape, generator=generator, device=device)
        elif param.dtype == "bool":
            found[param.name] = torch.rand(shape, generator=generator, device=device) < 0.5
        else:
            steps = torch.rand(shape, generator=generator, device=device)
            found[param.name] = ((steps < 0.02).cumsum(-1) if param.sorted else steps * 64).to(torch.int32)
    return found
