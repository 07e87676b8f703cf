"""Real input: a pretrained sentence encoder on sentences of mixed length, packed varlen against eager fp32."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import encoder as bert
import pytest
import torch
from kit import attention_by_reference
from torch import Tensor

import flashgen
from flashgen.runtime.ops.attention.problem import Inputs
from flashgen.runtime.verify.compare import check, named

COSINE = 0.9999
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])


@pytest.fixture(scope="module")
def folder() -> Path:
    found = bert.model_folder()
    if found is None:
        pytest.skip(f"{bert.PACKAGE} is not installed")
    for needed in ("safetensors", "tokenizers"):
        pytest.importorskip(needed)
    return found


@pytest.fixture(scope="module")
def eager_on_cpu(folder: Path) -> Tensor:
    return bert.embed_padded(bert.Encoder.load(folder), bert.tokens(folder), "cpu")


def cosines(a: Tensor, b: Tensor) -> Tensor:
    return (a.double() * b.double()).sum(-1)


def test_lengths_are_mixed(folder: Path) -> None:
    lengths = [len(row) for row in bert.tokens(folder)]
    assert min(lengths) < 5 and max(lengths) > 200 and len(set(lengths)) > 10


@DTYPES
def test_packing_on_the_cpu(folder: Path, dtype: torch.dtype, eager_on_cpu: Tensor) -> None:
    encoder, ids = bert.Encoder.load(folder), bert.tokens(folder)
    packed = bert.embed_packed(encoder, ids, "cpu", dtype, attention_by_reference)
    assert cosines(eager_on_cpu, packed).min() >= COSINE
    assert cosines(eager_on_cpu, packed.flip(0)).max() < 0.9  # the figure tells sentences apart


def test_the_encoder_understands(folder: Path) -> None:
    """The forward pass here is the model's own: paraphrases are near, other topics are far."""
    encoder = bert.Encoder.load(folder)
    ids = bert.tokens(folder, ("A man is playing the guitar.", "Someone plays guitar.", "The stock market fell today."))
    x = bert.embed_padded(encoder, ids, "cpu")
    assert x[0] @ x[1] > 0.8 and x[0] @ x[2] < 0.2


@pytest.mark.gpu
@DTYPES
def test_flashgen_in_the_encoder(folder: Path, dtype: torch.dtype, device: str,
                                 record_property: Callable[[str, object], None]) -> None:
    calls = 0

    def judged(q: Tensor, k: Tensor, v: Tensor, **cu_seqlens: Any) -> Tensor:
        """Each layer's call is held to the accuracy contract too: real activations, not normal noise."""
        nonlocal calls
        calls += 1
        out, lse = flashgen.attention(q, k, v, **cu_seqlens, return_lse=True)
        check(named(out, lse), Inputs(q, k, v, **cu_seqlens), label=f"encoder layer {calls}")
        return out

    encoder, ids = bert.Encoder.load(folder, device), bert.tokens(folder)
    eager = bert.embed_padded(encoder, ids, device)
    found = cosines(eager, bert.embed_packed(encoder, ids, device, dtype, judged))
    record_property("min_cosine", found.min().item())
    print(f"{dtype}: cosine to eager fp32 from {found.min():.7f}, mean {found.mean():.7f}, {len(ids)} sentences")
    assert calls == bert.NUM_LAYERS and found.min() >= COSINE
