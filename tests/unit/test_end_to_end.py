"""benchmarks/end_to_end.py on the CPU: small decoders give the same logits with every attention, and rows are kept."""
from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from flashgen.runtime.measure.grid import ROOT


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("end_to_end")


@pytest.fixture
def decoders(bench: Any) -> Any:
    return importlib.import_module("decoders")


def test_all_attentions_give_the_same_logits(bench: Any, tmp_path: Path) -> None:
    bench.main(["--device", "cpu", "--tiny", "-o", str(tmp_path)])
    rows = json.loads((tmp_path / "cpu" / "end-to-end.json").read_text())["rows"]
    names = {(row["model"], row["attention"], row["kind"]) for row in rows}
    assert names == {(model, name, kind) for model, attentions in (
        ("llama-3-8b", ("naive", "sdpa", "flashgen")), ("deepseek-v2-lite", ("naive", "absorbed", "flashgen")))
        for name in attentions for kind in ("prefill", "decode")}
    assert max(row["apart"] for row in rows) < 1e-4  # of the largest logit; fp32 throughout


@pytest.mark.parametrize(("model", "change"), [("llama-3-8b", "mask"), ("deepseek-v2-lite", "scale")])
def test_another_attention_is_found(bench: Any, decoders: Any, model: str, change: str,
                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """One without a mask, and a step whose scores are of another scale."""
    def unmasked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(*heads_first, enable_gqa=True).transpose(1, 2)

    def rescaled(q: torch.Tensor, *rest: Any) -> torch.Tensor:
        return decoded(1.5 * q, *rest)

    decoded = decoders.decoded_by_torch
    monkeypatch.setitem(decoders.ATTEND, "sdpa", unmasked)
    monkeypatch.setitem(decoders.LATENT, "absorbed", (decoders.sdpa, rescaled))
    kind = {"mask": "prefill", "scale": "decode"}[change]
    with pytest.raises(SystemExit, match=f"{model}, {kind}: the logits of .* are"):
        bench.compare(decoders.tiny(decoders.CONFIGS[model]), prompt=9, batch=1)


def test_a_step_after_a_prompt_is_a_longer_prompt(bench: Any, decoders: Any) -> None:
    """With the latents of the cache and without: what a cache keeps is what a prompt of one token more would see."""
    for config in map(decoders.tiny, decoders.CONFIGS.values()):
        model, tokens = decoders.Decoder(config, "cpu", torch.float32), torch.arange(12)[None]
        for name in decoders.attentions(config):
            attention = model.attention(name)
            caches, whole = model.caches(attention, 1, 12), model.caches(attention, 1, 12)
            model(tokens[:, :11], caches, 0, attention)
            step = model(tokens[:, 11:], caches, 11, attention)
            torch.testing.assert_close(step, model(tokens, whole, 0, attention), rtol=1e-4, atol=1e-4)


def test_sizes_are_those_of_the_models(decoders: Any) -> None:
    """Parameters of Llama-3-8B: 8.03 billion. A token of DeepSeek-V2-Lite keeps 576 numbers in the place of 5120."""
    shapes: list[tuple[int, ...]] = []

    def make(*shape: int) -> torch.Tensor:
        shapes.append(shape)
        return torch.empty(0)

    llama, deepseek = decoders.LLAMA, decoders.DEEPSEEK
    for number in range(llama.layers):
        decoders.Weights(llama, number, make)
    count = sum(rows * columns for rows, columns in shapes) + 2 * llama.vocab * llama.hidden
    assert count == pytest.approx(8.03e9, rel=1e-3)
    assert (deepseek.cache_columns(False), deepseek.cache_columns(True)) == (576, 16 * (192 + 128))
    assert llama.cache_columns(False) == llama.cache_columns(True) == 2 * 8 * 128
    assert deepseek.ffn == 8 * 1408


def test_rows_are_kept_one_by_one_and_not_made_again(bench: Any, decoders: Any, tmp_path: Path) -> None:
    config = decoders.tiny(decoders.LLAMA)
    tasks = list(bench.tasks_of(config, prompts=(8,), batches=(2,), cached=(4,)))
    rows: list[dict[str, Any]] = []
    stored: list[int] = []

    def measure(model: Any, task: Any) -> dict[str, Any]:
        if len(rows) == 4:
            raise KeyboardInterrupt  # as a time limit may
        bench.prepared(model, task)[0]()
        return {**task._asdict(), "status": "ok", "ms": 1.0, "tokens_per_s": 2.0, "peak_bytes": 3, "cache_bytes": 4}

    def store(found: list[dict[str, Any]]) -> None:
        stored.append(len(found))
        bench.write_results(bench.document({"gpu": "NVIDIA H200", "driver": "", "versions": {}}, rows=found), tmp_path,
                            bench.NAME)

    with pytest.raises(KeyboardInterrupt):
        bench.run([config], tasks, rows, measure, store, device="cpu")
    rows = bench.rows_there(tmp_path, "NVIDIA H200")
    assert stored == [1, 2, 3, 4] and [bench.key_of(row) for row in rows] == [tuple(task) for task in tasks[:4]]
    made: list[Any] = []
    bench.run([config], tasks, rows, lambda model, task: made.append(task) or {**task._asdict()}, store, device="cpu")
    assert made == tasks[4:] and stored[-1] == len(tasks) == 6
    assert bench.rows_there(None, "NVIDIA H200") == []


def test_what_goes_wrong_is_a_row(bench: Any, decoders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    task = next(bench.tasks_of(decoders.LLAMA))
    for error, status in ((torch.cuda.OutOfMemoryError("x"), "out of memory"),
                          (RuntimeError("CUDA out of memory in capture"), "out of memory"),
                          (ValueError("no\nmore"), "ValueError: no")):
        def fail(model: Any, task: Any, error: Exception = error) -> dict[str, Any]:
            raise error

        monkeypatch.setattr(bench, "measured", fail)
        assert bench.row_of(None, task) == {**task._asdict(), "status": status}


def test_table_and_picture(bench: Any, decoders: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = []
    for number, task in enumerate(bench.tasks_of(decoders.LLAMA, (8, 16), (1, 2), (4,))):
        ok = {"status": "ok", "ms": 1.5 + number, "tokens_per_s": 2.0, "peak_bytes": 3 * 10**9, "cache_bytes": 4}
        rows.append({**task._asdict(), **(ok if number != 3 else {"status": "out of memory"})})
    text = bench.table(rows)
    assert "| batch | tokens | naive, ms | sdpa, ms | flashgen, ms | naive, GB | sdpa, GB | flashgen, GB |" in text
    assert "| 1 | 8 | 1.5 | 2.5 | 3.5 | 3 | 3 | 3 |" in text and "| 1 | 16 | no memory | 5.5 |" in text
    assert bench.picture(rows, tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("arguments", "words"), [
    (["--device", "cpu"], "--tiny alone"), (["--layers", "0"], "whole numbers from 1"),
    (["--model", "gpt"], "invalid")])
def test_arguments_are_refused_by_name(bench: Any, arguments: list[str], words: str,
                                       capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.parsed(arguments)
    assert words in capsys.readouterr().err
