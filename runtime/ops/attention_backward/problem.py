"""BackwardProblem: the sizes and random numbers of one call for gradients. BackwardInputs: the tensors it makes."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from flashgen.runtime.ops.attention.problem import Inputs, Problem

if TYPE_CHECKING:
    import torch

    from flashgen.codegen.spec.spec import Spec
    from flashgen.runtime.verify.compare import Truth

DOUT_SEED = 10**9  # added to the problem's, which draws q, k and v. The CPU's generator keeps 32 bits of a seed


@dataclass(frozen=True)
class BackwardProblem(Problem):
    """One call, and the gradients of its results."""

    lse_gradient: bool = False  # whether the loss also depends on lse

    @classmethod
    def of(cls, problem: Problem, lse_gradient: bool = False) -> BackwardProblem:
        known = {field.name: getattr(problem, field.name) for field in fields(problem)}
        return cls(**{**known, "lse_gradient": lse_gradient})

    @property
    def plain(self) -> Problem:
        """The forward call."""
        return Problem(**{field.name: getattr(self, field.name) for field in fields(Problem)})

    @property
    def flops(self) -> int:
        """Of the five products of the pairs that the mask leaves: S, dP, dV, dQ and dK."""
        per_pair = super().flops // ((self.head_dim_qk + self.head_dim_v) or 1)
        return per_pair * (3 * self.head_dim_qk + 2 * self.head_dim_v)

    def make_inputs(self, device: str | torch.device = "cpu") -> BackwardInputs:
        """N(0, 1) tensors on `device`. out and lse are the fp64 reference's, rounded once: what an exact forward gives.
        """
        import torch

        from flashgen.runtime.verify.reference import reference

        found = super().make_inputs(device)
        generator = torch.Generator(device).manual_seed(DOUT_SEED + self.seed)
        out, lse = reference(found.q, found.k, found.v, **found.meaning)
        dout, dlse = (torch.randn(t.shape, device=device, generator=generator) for t in (out, lse))
        if self.tail:
            dout[-self.tail:] = dlse[:, -self.tail:] = float("nan")
        return BackwardInputs(**{field.name: getattr(found, field.name) for field in fields(found)},
                              dout=dout.to(found.q.dtype), out=out.to(found.q.dtype), lse=lse.float(),
                              dlse=dlse if self.lse_gradient else None)


@dataclass(frozen=True, kw_only=True)
class BackwardInputs(Inputs):
    """Arguments of one call for gradients."""

    dout: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    dlse: torch.Tensor | None = None

    @property
    def batch(self) -> int:
        return self.q.shape[0] if self.cu_seqlens_q is None else len(self.cu_seqlens_q) - 1

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What flashgen.attention_backward takes in its first places."""
        return self.dout, self.q, self.k, self.v, self.out, self.lse

    @property
    def keywords(self) -> dict[str, Any]:
        return {**super().keywords, "dlse": self.dlse}

    def with_mods(self, spec: Spec, params: Mapping[str, Any] | None = None, seed: int = 0) -> BackwardInputs:
        """The same call of a spec with expressions, with what its forward gives."""
        from flashgen.runtime.verify.reference import reference

        found = super().with_mods(spec, params, seed)
        meaning = {name: value for name, value in found.meaning.items() if name != "dlse"}
        out, lse = reference(found.q, found.k, found.v, **meaning)
        return found.with_(out=out.to(found.q.dtype), lse=lse.float())

    def truth(self) -> Truth:
        from flashgen.runtime.verify.gradients import FP32_SUMS, expected, gradients

        given = (self.dout, self.q, self.k, self.v)
        noise = FP32_SUMS * _longest(self.dout) * _longest(self.v) * self._scale
        exact, plain, rounded, sizes = (gradients(*given, **self.meaning, kind=kind)
                                        for kind in ("exact", "plain", "rounded", "sizes"))
        # dk sums the noise of the queries that see a key. Their weights add up to this many rows, on average.
        rows = max(1.0, self.q.shape[-3] * self.q.shape[-2] / max(1, self.k.shape[-3] * self.k.shape[-2]))
        of_k = noise * _largest(self.q) * rows ** 0.5
        return expected(exact, plain, rounded, sizes, (noise * _largest(self.k), of_k, 0.0))

    @property
    def _scale(self) -> float:
        return float(self.q.shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale)


def _longest(x: torch.Tensor) -> float:
    """The length of the longest row."""
    return float(x.float().nan_to_num(0.0).norm(dim=-1).max()) if x.numel() else 0.0


def _largest(x: torch.Tensor) -> float:
    return float(x.float().nan_to_num(0.0).abs().max()) if x.numel() else 0.0


def by_name(results: tuple[torch.Tensor, ...]) -> Mapping[str, torch.Tensor]:
    """The results of a call by name."""
    return dict(zip(("dq", "dk", "dv"), results, strict=True))
