"""Two decoders with random weights, for benchmarks/end_to_end.py: the layers of Llama-3-8B and DeepSeek-V2-Lite.

A decoder is a stack of RMSNorm, attention, RMSNorm, gated ffn, with rotary positions. What differs from the models:

- weights are random, so text means nothing, and times are the same;
- the experts of DeepSeek-V2-Lite are one dense ffn of the width that a token uses: 6 routed and 2 shared experts of
  1408 columns, 11264. The router, and the memory of the 58 experts that a token leaves alone, are left out;
- positions are rotated plainly, without the stretching that long contexts of either model use.

An attention is a class with the cache that it keeps for one layer: K and V as [batch, kv heads, length, columns], so
that torch's products read them as they lie, or latents as [batch, length, columns].
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import flashgen

PAGE_SIZE = 64
Make = Callable[..., Tensor]  # from a shape to a weight


@dataclass(frozen=True)
class Config:
    """Layer sizes. `latent` 0: grouped-query attention; else multi-head latent attention."""

    name: str
    hidden: int
    layers: int
    heads: int
    heads_kv: int
    nope: int        # columns of a head without positions; of grouped-query attention none
    rope: int        # columns with positions
    v_dim: int
    latent: int
    first_ffn: int   # of the first layer
    ffn: int         # of the others
    vocab: int

    @property
    def head_dim(self) -> int:
        return self.nope + self.rope

    def cache_columns(self, full: bool) -> int:
        """Of one token in one layer; `full`: K and V of every head."""
        if self.latent and not full:
            return self.latent + self.rope
        return self.heads_kv * (self.head_dim + self.v_dim)


LLAMA = Config("llama-3-8b", 4096, 32, 32, 8, 0, 128, 128, 0, 14336, 14336, 128256)
DEEPSEEK = Config("deepseek-v2-lite", 2048, 27, 16, 16, 128, 64, 128, 512, 10944, (6 + 2) * 1408, 102400)
CONFIGS = {config.name: config for config in (LLAMA, DEEPSEEK)}


def tiny(config: Config) -> Config:
    """Small in all but the head dims, which kernels are made for."""
    heads = min(config.heads, 4)
    return replace(config, hidden=96, layers=2, heads=heads, heads_kv=heads if config.latent else 2, first_ffn=80,
                   ffn=64, vocab=50)


# -- attention over what is at hand: q [batch, new, heads, columns], k and v [batch, length, kv heads, columns]. The
# last new token sees all keys.


def materialised(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores of all pairs in memory, as products of torch."""
    batch, new, heads, columns = q.shape
    length, heads_kv = k.shape[1:3]
    rows = q.unflatten(2, (heads_kv, -1)).permute(0, 2, 3, 1, 4).reshape(batch, heads_kv, -1, columns)
    scores = (rows @ k.permute(0, 2, 3, 1)).mul_(columns ** -0.5)
    if new > 1:
        hidden = torch.ones(new, length, dtype=torch.bool, device=q.device).triu_(length - new + 1)
        scores.view(batch, heads_kv, -1, new, length).masked_fill_(hidden, -torch.inf)
    out = torch.softmax(scores, -1) @ v.transpose(1, 2)
    return out.unflatten(2, (-1, new)).permute(0, 3, 1, 2, 4).reshape(batch, new, heads, -1)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's. Values of fewer columns than keys are padded, as callers of its flash kernel do."""
    columns, heads_first = v.shape[-1], [x.transpose(1, 2) for x in (q, k, functional.pad(v, (0, k.shape[-1]
                                                                                         - v.shape[-1])))]
    assert q.shape[1] in (1, k.shape[1]), "its causal mask is aligned top-left"
    out = functional.scaled_dot_product_attention(*heads_first, is_causal=q.shape[1] > 1,
                                                  enable_gqa=q.shape[2] != k.shape[2])
    return out.transpose(1, 2)[..., :columns]


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """flashgen's. On the CPU its emulator would take minutes for a model, so the fp64 reference stands there."""
    if not q.is_cuda:
        from flashgen.runtime.verify.reference import reference

        return reference(q, k, v, causal=True)[0].to(q.dtype)
    out = flashgen.attention(q, k, v, causal=True)
    assert isinstance(out, Tensor)
    return out


ATTEND: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "naive": materialised, "sdpa": sdpa, "flashgen": ours}


# -- attention layers


class Weights:
    """Of one layer. Matrices are [out, in]."""

    def __init__(self, config: Config, number: int, make: Make) -> None:
        c, ffn = config, config.ffn if number else config.first_ffn
        self.q = make(c.heads * c.head_dim, c.hidden)
        self.out = make(c.hidden, c.heads * c.v_dim)
        if c.latent:
            self.kv = make(c.latent + c.rope, c.hidden)
            self.up_k, self.up_v = make(c.heads * c.nope, c.latent), make(c.heads * c.v_dim, c.latent)
        else:
            self.kv = make(c.heads_kv * (c.head_dim + c.v_dim), c.hidden)
        self.gate_up, self.down = make(2 * ffn, c.hidden), make(c.hidden, ffn)


class Grouped:
    """Grouped-query attention: K and V of the kv heads are kept."""

    def __init__(self, config: Config, attention: str) -> None:
        self.config, self.attend = config, ATTEND[attention]

    def cache(self, make: Make, batch: int, length: int) -> list[Tensor]:
        c = self.config
        return [make(batch, c.heads_kv, length, columns) for columns in (c.head_dim, c.v_dim)]

    def plan(self, cache: Sequence[Tensor], length: int) -> Any:
        """What all layers of a decode step share."""

    def __call__(self, x: Tensor, w: Weights, cache: Sequence[Tensor], start: int, turns: Tensor, plan: Any) -> Tensor:
        c = self.config
        q = rotated(functional.linear(x, w.q).unflatten(-1, (c.heads, -1)), turns)
        k, v = functional.linear(x, w.kv).unflatten(-1, (c.heads_kv, -1)).split((c.head_dim, c.v_dim), -1)
        return self.attend(q, *stored(cache, (rotated(k, turns), v), start))


def stored(cache: Sequence[Tensor], new: Sequence[Tensor], start: int) -> list[Tensor]:
    """The cached K and V with `new` ones [batch, new, kv heads, columns] at `start`: views [batch, length, ...]."""
    end = start + new[0].shape[1]
    for kept, one in zip(cache, new, strict=True):
        kept[:, :, start:end] = one.transpose(1, 2)
    return [kept[:, :, :end].transpose(1, 2) for kept in cache]


class Latent:
    """Multi-head latent attention. A prompt is attended to with full K and V, which is less work while many queries
    share them; what is kept, and how a new token reads it, is what differs."""

    def __init__(self, config: Config, attention: str) -> None:
        self.config, self.attend, self.decode = config, *LATENT[attention]
        self.full = self.decode is None

    def cache(self, make: Make, batch: int, length: int) -> list[Tensor]:
        c = self.config
        if self.full:
            return [make(batch, c.heads, length, columns) for columns in (c.head_dim, c.v_dim)]
        return [make(batch, -(-length // PAGE_SIZE) * PAGE_SIZE, c.latent + c.rope)]

    def plan(self, cache: Sequence[Tensor], length: int) -> Any:
        """(lengths, page table, schedule) of flashgen's decode. The pages of a request lie one after the other."""
        if self.decode is not decoded_by_ours:
            return None
        (batch, rows), device = cache[0].shape[:2], cache[0].device
        lengths = torch.full((batch,), length, dtype=torch.int32, device=device)
        table = torch.arange(batch * rows // PAGE_SIZE, dtype=torch.int32, device=device).view(batch, -1)
        return lengths, table, flashgen.mla_schedule(lengths, self.config.heads) if lengths.is_cuda else None

    def __call__(self, x: Tensor, w: Weights, cache: Sequence[Tensor], start: int, turns: Tensor, plan: Any) -> Tensor:
        c, end = self.config, start + x.shape[1]
        nope, rope = functional.linear(x, w.q).unflatten(-1, (c.heads, -1)).split((c.nope, c.rope), -1)
        latent, shared = functional.linear(x, w.kv).split((c.latent, c.rope), -1)
        rope, shared = rotated(rope, turns), rotated(shared[:, :, None], turns)[:, :, 0]
        if not self.full:
            cache[0][:, start:end] = torch.cat((latent, shared), -1)
        if self.full or not start:
            k, v = (functional.linear(latent, up).unflatten(-1, (c.heads, -1)) for up in (w.up_k, w.up_v))
            k = torch.cat((k, shared[:, :, None].expand(*k.shape[:3], c.rope)), -1)
            if self.full:
                k, v = stored(cache, (k, v), start)
            return self.attend(torch.cat((nope, rope), -1), k, v)
        up_k, up_v = (up.unflatten(0, (c.heads, -1)) for up in (w.up_k, w.up_v))
        q = torch.cat((torch.einsum("bqhd,hdc->bqhc", nope, up_k), rope), -1)
        out = self.decode(q, cache[0], end, c, plan)
        return torch.einsum("bqhc,hdc->bqhd", out, up_v)


def decoded_by_torch(q: Tensor, cache: Tensor, length: int, c: Config, plan: Any) -> Tensor:
    """All heads over the latents by products of torch: q [batch, 1, heads, 576] gives [batch, 1, heads, 512]."""
    keys = cache[:, :length]
    scores = (q[:, 0] @ keys.mT).mul_(c.head_dim ** -0.5)
    return (torch.softmax(scores, -1) @ keys[..., :c.latent])[:, None]


def decoded_by_ours(q: Tensor, cache: Tensor, length: int, c: Config, plan: Any) -> Tensor:
    """flashgen.mla_decode; on the CPU the fp64 reference, as in `ours`."""
    lengths, table, schedule = plan
    if not q.is_cuda:
        from flashgen.runtime.verify.reference import reference

        keys = cache[:, :length, None]
        return reference(q, keys, keys[..., :c.latent], softmax_scale=c.head_dim ** -0.5)[0].to(q.dtype)
    out = flashgen.mla_decode(q, cache.view(-1, PAGE_SIZE, cache.shape[-1]), lengths, page_table=table,
                              softmax_scale=c.head_dim ** -0.5, schedule=schedule)
    assert isinstance(out, Tensor)
    return out


# (how a prompt is attended to, how a new token reads latents; None: it reads full K and V, as the prompt does)
LATENT: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor] | None]] = {
    "naive": (materialised, None), "absorbed": (sdpa, decoded_by_torch), "flashgen": (ours, decoded_by_ours)}


def attentions(config: Config) -> list[str]:
    return [*(LATENT if config.latent else ATTEND)]


# -- the model


def rotated(x: Tensor, turns: Tensor) -> Tensor:
    """Rotary position embedding, half split. `turns`: cos and sin, [2, new, 1, columns / 2]."""
    first, second = x.chunk(2, -1)
    cos, sin = turns.to(x.dtype)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), -1)


class Decoder:
    """Weights from N(0, 1 / columns), alike for all attentions."""

    def __init__(self, config: Config, device: str, dtype: torch.dtype, seed: int = 0) -> None:
        self.config, self.device, self.dtype = config, device, dtype
        generator = torch.Generator(device).manual_seed(seed)

        def make(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device, dtype=dtype, generator=generator).mul_(shape[-1] ** -0.5)

        self.embedding, self.head = make(config.vocab, config.hidden).mul_(config.hidden ** 0.5), make(
            config.vocab, config.hidden)
        self.layers = [Weights(config, number, make) for number in range(config.layers)]

    def attention(self, name: str) -> Grouped | Latent:
        return (Latent if self.config.latent else Grouped)(self.config, name)

    def caches(self, attention: Grouped | Latent, batch: int, length: int, filled: bool = False) -> list[list[Tensor]]:
        """One for each layer; `filled` with N(0, 1), as if tokens had come before."""
        fill = torch.randn if filled else torch.zeros

        def make(*shape: int) -> Tensor:
            return fill(*shape, device=self.device, dtype=self.dtype)
        return [attention.cache(make, batch, length) for _ in self.layers]

    def turns(self, start: int, end: int) -> Tensor:
        columns = self.config.rope
        angles = torch.arange(start, end, device=self.device)[:, None] * 10000.0 ** (
            -torch.arange(0, columns, 2, device=self.device) / columns)
        return torch.stack((angles.cos(), angles.sin()))[:, :, None]

    def __call__(self, tokens: Tensor, caches: Sequence[Sequence[Tensor]], start: int, attention: Grouped | Latent
                 ) -> Tensor:
        """Logits [batch, vocab] after tokens [batch, new] at positions from `start` on; caches take their keys."""
        x, turns = functional.embedding(tokens, self.embedding), self.turns(start, start + tokens.shape[1])
        plan = attention.plan(caches[0], start + 1) if start else None
        for w, cache in zip(self.layers, caches, strict=True):
            x = x + functional.linear(attention(normed(x), w, cache, start, turns, plan).flatten(2), w.out)
            gate, up = functional.linear(normed(x), w.gate_up).chunk(2, -1)
            x = x + functional.linear(functional.silu(gate) * up, w.down)
        return functional.linear(normed(x[:, -1]), self.head)


def normed(x: Tensor) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:])
