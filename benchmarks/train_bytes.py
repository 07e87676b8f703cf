"""Trains a small byte-level GPT on the sources of Python's standard library, once for each attention, from one seed.

    python benchmarks/train_bytes.py [-o DIR] [--steps N] [--picture PNG]

It writes loss curves, step times and peak memory to DIR/<gpu>/train-bytes.json. Models have about 10 M parameters; one
has heads of 64 columns, one of 128, and in both query heads share keys and values. "sdpa-again" is torch's attention by
another of its kernels: how far two right implementations part tells how far ours may. The variants cap scores, see a
window alone, and keep documents apart; flex-variant is torch's compiled FlexAttention.
"""
from __future__ import annotations

import argparse
import math
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import flashgen
from flashgen.runtime.measure.bench import document, write_results
from flashgen.runtime.measure.device import CudaDevice

WIDTH, LAYERS, SEQLEN, BATCH = 384, 6, 2048, 16
LEARNING_RATE, WARMUP_STEPS = 1e-3, 50
SMOOTHED_STEPS = 25     # of a loss curve, where two are compared
LINES_PER_DOCUMENT = 20
TEXT_BYTES = 16 << 20

# From q, k, v [batch, seqlen, heads, head_dim] and the document of each position, [batch, seqlen]. All are causal.
Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Shape(NamedTuple):
    """Of a model's heads."""

    head_dim: int
    num_heads_q: int
    num_heads_kv: int


SHAPES = (Shape(64, 6, 2), Shape(128, 3, 1))


def text() -> Tensor:
    """Python files of the standard library as bytes, by name."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    found = b"".join(path.read_bytes() for path in paths if "site-packages" not in path.parts)[:TEXT_BYTES]
    return torch.frombuffer(bytearray(found), dtype=torch.uint8)


# -- the model


class Block(nn.Module):
    def __init__(self, shape: Shape, attend: Attend) -> None:
        super().__init__()
        self.shape, self.attend = shape, attend
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv = nn.Linear(WIDTH, (shape.num_heads_q + 2 * shape.num_heads_kv) * shape.head_dim, bias=False)
        self.out = nn.Linear(shape.num_heads_q * shape.head_dim, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, turns: Tensor, documents: Tensor) -> Tensor:
        head_dim, heads, kv_heads = self.shape
        heads_first = self.qkv(self.norms[0](x)).unflatten(-1, (-1, head_dim))
        q, k, v = heads_first.split((heads, kv_heads, kv_heads), dim=2)
        x = x + self.out(self.attend(rotated(q, turns), rotated(k, turns), v, documents).flatten(2))
        x = x + self.down(functional.gelu(self.up(self.norms[1](x))))
        return x


def rotated(x: Tensor, turns: Tensor) -> Tensor:
    """Rotary position embedding, half split. `turns`: cos and sin, [2, seqlen, 1, head_dim / 2]."""
    first, second = x.chunk(2, -1)
    cos, sin = turns.to(x.dtype)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), -1)


class Gpt(nn.Module):
    def __init__(self, shape: Shape, attend: Attend) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList([Block(shape, attend) for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        angles = torch.arange(SEQLEN)[:, None] * 10000.0 ** (-torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        self.register_buffer("turns", torch.stack((angles.cos(), angles.sin()))[:, :, None], persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        documents = (tokens == ord("\n")).cumsum(1).div(LINES_PER_DOCUMENT, rounding_mode="floor").int()
        for block in self.blocks:
            x = block(x, self.turns, documents)
        logits: Tensor = self.head(self.norm(x))
        return logits


# -- attentions


def ours(q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
    out = flashgen.attention(q, k, v, causal=True)
    assert isinstance(out, Tensor)
    return out


def sdpa(backend: str) -> Attend:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def attend(q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(getattr(SDPBackend, backend)):
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)
    return attend


# A variant: softcapped scores, a window, and documents that do not see each other.
SOFTCAP, WINDOW = 30.0, 512
VARIANT_MASK = f"kv_pos <= q_pos and q_pos - kv_pos < {WINDOW} and doc[batch, kv_pos] == doc[batch, q_pos]"


def our_variant() -> Attend:
    made = flashgen.variant(f"{SOFTCAP} * tanh(score / {SOFTCAP})", VARIANT_MASK, params={
        "doc": {"type": "tensor", "dtype": "int32", "shape": ["batch", "seqlen_kv"], "sorted": True}})

    def attend(q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
        out = flashgen.attention(q, k, v, spec=made, params={"doc": documents})
        assert isinstance(out, Tensor)
        return out
    return attend


def flex_variant() -> Attend:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled: Any = torch.compile(flex_attention, dynamic=False)
    blocks: Any = torch.compile(create_block_mask)
    held: dict[int, Any] = {}  # the block mask of a step serves all of its layers

    def attend(q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
        def seen(b: Tensor, h: Tensor, q_pos: Tensor, kv_pos: Tensor) -> Tensor:
            same = documents[b, kv_pos] == documents[b, q_pos]
            return (kv_pos <= q_pos) & (q_pos - kv_pos < WINDOW) & same

        if id(documents) not in held:
            held.clear()
            held[id(documents)] = blocks(seen, q.shape[0], None, q.shape[1], k.shape[1], device=q.device)
        out: Tensor = compiled(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=held[id(documents)], enable_gqa=True,
                       score_mod=lambda score, b, h, q_pos, kv_pos: SOFTCAP * torch.tanh(score / SOFTCAP))
        return out.transpose(1, 2)
    return attend


ATTENTIONS: dict[str, Callable[[], Attend]] = {
    "flashgen": lambda: ours, "sdpa": lambda: sdpa("FLASH_ATTENTION"), "sdpa-again": lambda: sdpa("CUDNN_ATTENTION"),
    "flashgen-variant": our_variant, "flex-variant": flex_variant,
}
COMPARED = (("flashgen", "sdpa"), ("sdpa-again", "sdpa"), ("flashgen-variant", "flex-variant"))


# -- training


def batches(data: Tensor, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(data) - SEQLEN - 1, (BATCH,), generator=generator)
        yield torch.stack([data[start:start + SEQLEN + 1] for start in starts.tolist()]).long()


def train(shape: Shape, attend: Attend, data: Tensor, steps: int, device: str) -> dict[str, Any]:
    """Loss of each step, median milliseconds of a step, peak bytes."""
    torch.manual_seed(0)
    model = Gpt(shape, attend).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    is_cuda = device != "cpu"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    losses, times = [], []
    for step, tokens in zip(range(steps), batches(data, 1), strict=False):
        rate = min(1.0, (step + 1) / WARMUP_STEPS) * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * rate
        tokens = tokens.to(device)
        start = time.perf_counter()
        with torch.autocast(device, torch.bfloat16):
            logits = model(tokens[:, :-1])
        loss = functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())  # waits for the step
        times.append(time.perf_counter() - start)
        print(f"\r{step + 1:4d} / {steps}  loss {losses[-1]:.3f}  {1e3 * times[-1]:.1f} ms", end="", file=sys.stderr)
    print(file=sys.stderr)
    return {"parameters": sum(p.numel() for p in model.parameters()), "losses": [round(x, 5) for x in losses],
            "step_ms": round(1e3 * statistics.median(times[len(times) // 4:]), 3),
            "peak_bytes": torch.cuda.max_memory_allocated() if is_cuda else 0}


def smoothed(losses: list[float]) -> list[float]:
    return [statistics.fmean(losses[max(0, i - SMOOTHED_STEPS):i + 1]) for i in range(len(losses))]


def apart(one: list[float], other: list[float]) -> float:
    """The largest distance of two smoothed curves after the warm-up."""
    pairs = list(zip(smoothed(one), smoothed(other), strict=True))[WARMUP_STEPS:]
    return max(abs(a - b) for a, b in pairs) if pairs else 0.0


def picture(rows: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, shape in zip(figure.subplots(1, len(SHAPES), sharey=True), SHAPES, strict=True):
        for row in (row for row in rows if row["head_dim"] == shape.head_dim):
            axes.plot(smoothed(row["losses"]), label=f"{row['attention']}, {row['step_ms']:.1f} ms a step",
                      linestyle="-" if row["attention"].startswith("flashgen") else "--")
        axes.set(title=f"head dim {shape.head_dim}, {shape.num_heads_q} query heads over {shape.num_heads_kv}",
                 xlabel="step", ylabel="loss (nats per byte)")
        axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path, help="folder of results")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--commit", help="of the code, where no checkout can be asked")
    options = parser.parse_args()
    device, data, rows = CudaDevice(), text(), []
    for shape in SHAPES:
        for name, make in ATTENTIONS.items():
            print(f"head dim {shape.head_dim}, {name}", file=sys.stderr)
            rows.append({"attention": name, **shape._asdict(), **train(shape, make(), data, options.steps, "cuda")})
    for shape in SHAPES:
        curves = {row["attention"]: row["losses"] for row in rows if row["head_dim"] == shape.head_dim}
        for name, other in COMPARED:
            distance = apart(curves[name], curves[other])
            print(f"head dim {shape.head_dim}: {name} is at most {distance:.4f} from {other}")
    for row in rows:
        print(f"head dim {row['head_dim']}, {row['attention']}: {row['step_ms']} ms a step, loss "
              f"{row['losses'][-1]:.3f}, peak {row['peak_bytes'] / 2**30:.2f} GiB")
    if options.out:
        settings = {"width": WIDTH, "layers": LAYERS, "seqlen": SEQLEN, "batch": BATCH, "steps": options.steps}
        print(write_results(document(device.facts(), options.commit, settings=settings, rows=rows), options.out,
                            "train-bytes"))
    if options.picture:
        picture(rows, options.picture)


if __name__ == "__main__":
    main()
