"""benchmarks/end_to_end.py with flashgen's own kernels: small decoders, whose logits agree, and rows of each kind."""
from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from flashgen.runtime.measure.grid import ROOT

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("model", ["llama-3-8b", "deepseek-v2-lite"])
def test_small_decoders(model: str, cuda: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if model.startswith("deepseek") and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("flashgen.mla_decode needs Hopper")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    bench: Any = importlib.import_module("end_to_end")
    config = bench.tiny(bench.CONFIGS[model])
    assert len(bench.compare(config, "cuda", prompt=200)) == 6
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        bench.run([config], list(bench.tasks_of(config, (256,), (2,), (128,))), rows, bench.row_of, lambda rows: None)
    assert [row["status"] for row in rows] == ["ok"] * 6, rows
    assert all(row["ms"] > 0 and row["peak_bytes"] > row["cache_bytes"] > 0 for row in rows), rows
