"""The generations of a decode on the device: naive and absorbed by torch, and the families, on one latent cache."""
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from flashgen.codegen.dtype import DTYPES
from flashgen.runtime.measure.bench import Call, Device, sets_needed
from flashgen.runtime.measure.lineage import Generation
from flashgen.runtime.ops.attention.lineage_timed import relative_error
from flashgen.runtime.ops.mla_decode.bench import HEAD_DIM_V, MlaCase
from flashgen.runtime.ops.mla_decode.lineage import ABSORBED, LATENT, NAIVE, NOPE, ROPE, V_DIM
from flashgen.runtime.ops.mla_decode.problem import MlaInputs
from flashgen.runtime.ops.mla_decode.timed import PAGE_SIZE, DecodeJob
from flashgen.runtime.verify.reference import visible

SCALE = (NOPE + ROPE) ** -0.5


class Model:
    """One set of tensors: q of every head, the latent cache, and W_uk and W_uv, from N(0, 1).

    q [batch, new, heads, 192]; cache [batch, rows, 576], rows up to whole pages; w_uk, w_uv [heads, 128, 512], so small
    that K and V have unit variance. `absorbed` is q with W_uk in it: [batch, new, heads, 576].
    """

    def __init__(self, case: MlaCase, seed: int, device: str) -> None:
        self.case = case
        dtype, generator = getattr(torch, DTYPES[case.dtype].torch_name), torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device, generator=generator)

        rows = -(-case.seqlen_kv // PAGE_SIZE) * PAGE_SIZE
        self.q = normal(case.batch, case.seqlen_q, case.num_heads_q, NOPE + ROPE).to(dtype)
        self.cache = torch.empty(case.batch, rows, LATENT + ROPE, dtype=dtype, device=device)
        for one in self.cache:
            one.copy_(normal(*one.shape))
        self.w_uk, self.w_uv = ((normal(case.num_heads_q, columns, LATENT) / LATENT ** 0.5).to(dtype)
                                for columns in (NOPE, V_DIM))
        self.absorbed = self.absorb(torch.float32).to(dtype)

    def absorb(self, dtype: torch.dtype) -> Tensor:
        nope, rope = self.q.to(dtype).split((NOPE, ROPE), -1)
        return torch.cat((torch.einsum("bqhd,hdc->bqhc", nope, self.w_uk.to(dtype)), rope), -1)

    @property
    def mask(self) -> Tensor | None:
        """[new, keys]: what each of several new tokens sees."""
        case = self.case
        return visible(case.seqlen_q, case.seqlen_kv, causal=True, device=self.q.device) if case.seqlen_q > 1 else None

    def paged(self) -> MlaInputs:
        """The call of flashgen.mla_decode, whose pages lie in their order."""
        case, (batch, rows, columns) = self.case, self.cache.shape
        count, device = rows // PAGE_SIZE, self.cache.device
        table = torch.arange(batch * count, dtype=torch.int32, device=device).view(batch, count)
        lengths = torch.full((batch,), case.seqlen_kv, dtype=torch.int32, device=device)
        return MlaInputs(self.absorbed, self.cache.view(-1, PAGE_SIZE, columns), lengths, table, case.seqlen_q > 1,
                         SCALE)

    def dense(self) -> MlaInputs:
        """Likewise for kernels without pages."""
        lengths = torch.full((self.case.batch,), self.case.seqlen_kv, dtype=torch.int32, device=self.cache.device)
        return MlaInputs(self.absorbed, self.cache, lengths, None, self.case.seqlen_q > 1, SCALE)


# -- baselines


def naive(x: Model) -> Tensor:
    """[batch, new, heads, 128]: K and V of every head from the cache, then attention over them."""
    batch, heads, length = x.case.batch, x.case.num_heads_q, x.case.seqlen_kv
    latent, rope = x.cache[:, :length].split((LATENT, ROPE), -1)
    k, v = (functional.linear(latent, w.flatten(0, 1)).unflatten(-1, (heads, -1)) for w in (x.w_uk, x.w_uv))
    k = torch.cat((k, rope[:, :, None].expand(batch, length, heads, ROPE)), -1)
    q, k, v = (t.transpose(1, 2) for t in (x.q, k, v))
    out: Tensor = functional.scaled_dot_product_attention(q, k, v, attn_mask=x.mask, scale=SCALE)
    return out.transpose(1, 2)


def absorbed(x: Model) -> Tensor:
    """[batch, new, heads, 512]: all heads over the latents, with S and P in memory."""
    q, cache = x.absorbed.flatten(1, 2), x.cache[:, :x.case.seqlen_kv]
    scores = (q @ cache.mT).unflatten(1, x.absorbed.shape[1:3])
    scores = scores * SCALE if x.mask is None else (scores * SCALE).masked_fill(~x.mask[:, None], -torch.inf)
    out: Tensor = (torch.softmax(scores, -1).flatten(1, 2) @ cache[..., :LATENT]).unflatten(1, x.absorbed.shape[1:3])
    return out


BASELINES: dict[str, Callable[[Model], Tensor]] = {NAIVE: naive, ABSORBED: absorbed}


# -- jobs


class Sets:
    def __init__(self, models: Sequence[Model]) -> None:
        self.models = models

    @functools.cached_property
    def right(self) -> list[tuple[int, Tensor]]:
        """(request, its result in fp64 [1, new, heads, 128]) of the first and the last request."""
        x, found = self.models[0], []
        q, mask, length = x.absorb(torch.float64), x.mask, x.case.seqlen_kv
        for i in dict.fromkeys((0, x.case.batch - 1)):
            cache = x.cache[i, :length].double()
            scores = torch.einsum("qhc,kc->qhk", q[i], cache) * SCALE
            if mask is not None:
                scores = scores.masked_fill(~mask[:, None], -torch.inf)
            latent = torch.softmax(scores, -1) @ cache[:, :LATENT]
            found.append((i, up(latent[None], x.w_uv)))
        return found


def up(latent: Tensor, w_uv: Tensor) -> Tensor:
    """Results over latents [batch, new, heads, 512] as those of heads [.., 128], in fp64."""
    return torch.einsum("bqhc,hdc->bqhd", latent.double(), w_uv.double())


def inputs(device: Device, case: MlaCase, past_l2: bool = True) -> Sets:
    count = sets_needed(case.bytes, device.l2_bytes) if past_l2 else 1
    return Sets([Model(case, seed, device.place) for seed in range(count)])


class LineageJob:
    def __init__(self, case: MlaCase, generation: Generation, sets: Sets) -> None:
        self.case, self.generation, self.sets = case, generation, sets
        self.result: Tensor | None = None

    def calls(self) -> Sequence[Call]:
        if self.generation.specs:
            [spec], jobs = self.generation.specs, []
            for x in self.sets.models:
                jobs.append(DecodeJob(self.case, spec, x.paged() if spec.kv_layout == "paged" else x.dense()))
            calls = [call for job in jobs for call in job.ours()]
            self.result = jobs[0].out
            return calls
        attend = BASELINES[self.generation.name]
        self.result = attend(self.sets.models[0])
        return [functools.partial(attend, x) for x in self.sets.models]

    def held_bytes(self) -> int:
        x = self.sets.models[0]
        held = (x.q, x.cache, x.w_uk, x.w_uv) if self.generation.name == NAIVE else (x.absorbed, x.cache)
        return sum(t.numel() * t.element_size() for t in held)

    def error(self) -> float:
        """Of the first and the last request, after W_uv where the result is of latents."""
        assert self.result is not None, "calls() comes first"
        pairs = []
        for i, right in self.sets.right:
            found = self.result[i:i + 1]
            found = up(found, self.sets.models[0].w_uv) if found.shape[-1] == HEAD_DIM_V else found.double()
            pairs.append((found, right))
        return relative_error(pairs)


job = LineageJob
