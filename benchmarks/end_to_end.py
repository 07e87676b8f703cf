"""Whole decoders with one attention beside another: time to the first token, tokens per second, peak memory.

    python benchmarks/end_to_end.py [-o DIR] [--model NAME] [--layers N] [--resume] [--picture PNG] [--table MD]
    python benchmarks/end_to_end.py --rows FILE [--picture PNG] [--table MD]
    python benchmarks/end_to_end.py --device cpu --tiny

The decoders have the layer sizes of Llama-3-8B and DeepSeek-V2-Lite, and random weights in bf16. The experts are one
dense ffn of the width that a token uses; decoders.py says what else is left out. A prompt of one request is timed until
the logits of its last token are there, as plain calls. A decode step of many requests is timed as a CUDA graph, which
is replayed: a step at the same length each time, over caches of random numbers. Attentions:

- llama: `naive` keeps all scores in memory, `sdpa` is torch's own choice of kernel, `flashgen` is flashgen.attention;
- deepseek: `naive` caches full K and V of every head and keeps all scores in memory; `absorbed` caches latents, and
  attends by SDPA in a prompt and by torch's products in a step; `flashgen` is flashgen.attention and mla_decode.

Out of memory is a result. Rows are written after each of them, to DIR/<gpu>/end-to-end.json; --resume leaves out what
is there. With --tiny, the logits of all attentions are compared after a prompt and after a step: on a GPU in bf16; on
the CPU in fp32, where the fp64 reference answers flashgen's calls, as the emulator would take minutes.
"""
from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from decoders import CONFIGS, Config, Decoder, attentions, tiny
from torch import Tensor

from flashgen import __version__
from flashgen.cli.progress import progress
from flashgen.runtime.measure.bench import digits, document, gpu_folder, write_results

PROMPTS = (2048, 4096, 8192, 16384, 32768, 65536)
BATCHES, CACHED = (1, 4, 16, 64), (4096, 8192, 16384, 32768)
ROUNDS = 3           # each of several replays or calls; the median counts
# How far logits may be apart, of the largest one: in fp32, and after a few roundings to bf16 in each of two layers.
AGREE = {"cpu": (torch.float32, 1e-3), "cuda": (torch.bfloat16, 5e-2)}
NAME = "end-to-end"


class Task(NamedTuple):
    """One row: a prompt of `length` tokens, or a step over `length` cached ones."""

    model: str
    layers: int
    kind: str
    attention: str
    batch: int
    length: int

    @property
    def text(self) -> str:
        return f"{self.model} {self.kind}, {self.attention}, batch {self.batch}, {self.length} tokens"


def tasks_of(config: Config, prompts: Sequence[int] = PROMPTS, batches: Sequence[int] = BATCHES,
             cached: Sequence[int] = CACHED) -> Iterator[Task]:
    for length in prompts:
        for name in attentions(config):
            yield Task(config.name, config.layers, "prefill", name, 1, length)
    for batch in batches:
        for length in cached:
            for name in attentions(config):
                yield Task(config.name, config.layers, "decode", name, batch, length)


# -- one row


def prepared(model: Decoder, task: Task) -> tuple[Callable[[], Tensor], int]:
    """(the call of a task, bytes of its caches)."""
    attention = model.attention(task.attention)
    is_prompt = task.kind == "prefill"
    start, new = (0, task.length) if is_prompt else (task.length, 1)
    caches = model.caches(attention, task.batch, start + new, filled=not is_prompt)
    tokens = torch.randint(model.config.vocab, (task.batch, new), device=model.device,
                           generator=torch.Generator(model.device).manual_seed(1))
    cached = sum(t.numel() * t.element_size() for cache in caches for t in cache)
    return lambda: model(tokens, caches, start, attention), cached


def measured(model: Decoder, task: Task) -> dict[str, Any]:
    from flashgen.runtime.measure.device import event_timer, graph_timer

    torch.cuda.reset_peak_memory_stats()
    call, cached = prepared(model, task)
    call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    run = (event_timer if task.kind == "prefill" else graph_timer)([call])
    ms = statistics.median(run() for _ in range(ROUNDS))
    tokens = task.length if task.kind == "prefill" else task.batch
    return {"ms": digits(ms), "tokens_per_s": digits(1e3 * tokens / ms), "peak_bytes": peak, "cache_bytes": cached}


def row_of(model: Decoder, task: Task) -> dict[str, Any]:
    """Whatever goes wrong is a row, too: the others still come."""
    try:
        return {**task._asdict(), "status": "ok", **measured(model, task)}
    except torch.cuda.OutOfMemoryError:
        status = "out of memory"
    except Exception as err:
        text = str(err).strip().partition("\n")[0]
        status = "out of memory" if "out of memory" in text else f"{type(err).__name__}: {text}"
    return {**task._asdict(), "status": status}


# -- the run


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in Task._fields)


def rows_there(folder: Path | None, gpu: str) -> list[dict[str, Any]]:
    path = folder and folder / gpu_folder(gpu) / f"{NAME}.json"
    return json.loads(path.read_text(encoding="utf-8"))["rows"] if path and path.is_file() else []


def run(configs: Sequence[Config], tasks: Sequence[Task], rows: list[dict[str, Any]],
        measure: Callable[[Decoder, Task], dict[str, Any]], store: Callable[[list[dict[str, Any]]], object],
        device: str = "cuda") -> None:
    """Append a row for each task that has none; `store` gets them after each."""
    there = {key_of(row) for row in rows}
    left = [task for task in tasks if tuple(task) not in there]
    with progress("end to end", len(left)) as step:
        for config in configs:
            own, model = [task for task in left if task.model == config.name], None
            for task in own:
                model = model or Decoder(config, device, torch.bfloat16)
                step(left.index(task), task.text)
                rows.append(measure(model, task))
                store(rows)
                if device != "cpu":
                    torch.cuda.empty_cache()
            del model


def compare(config: Config, device: str = "cpu", prompt: int = 70, batch: int = 2) -> list[dict[str, Any]]:
    """All attentions on one prompt and one step after it: rows with the largest distance of logits from the first
    attention's, over the largest logit. SystemExit where one is above AGREE."""
    dtype, allowed = AGREE[device]
    model, rows = Decoder(config, device, dtype), []
    tokens = torch.randint(config.vocab, (batch, prompt + 1), generator=torch.Generator().manual_seed(1)).to(device)
    first: list[Tensor] = []
    for name in attentions(config):
        attention = model.attention(name)
        caches = model.caches(attention, batch, prompt + 3)
        logits = [model(tokens[:, :prompt], caches, 0, attention), model(tokens[:, prompt:], caches, prompt, attention)]
        first = first or logits
        for kind, found, right in zip(("prefill", "decode"), logits, first, strict=True):
            apart = float((found - right).abs().max() / right.abs().max())
            rows.append({**Task(config.name, config.layers, kind, name, batch, prompt)._asdict(), "status": "ok",
                         "apart": float(f"{apart:.3g}")})
            if not apart < allowed:
                raise SystemExit(f"{config.name}, {kind}: the logits of {name} are {apart:.3g} from those of "
                                 f"{attentions(config)[0]}; allowed: {allowed:g}")
    return rows


# -- what is shown


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: a line for each problem, a column of ms and of GB for each attention."""
    parts = []
    for model, kind in dict.fromkeys((row["model"], row["kind"]) for row in rows):
        own = [row for row in rows if (row["model"], row["kind"]) == (model, kind)]
        names = list(dict.fromkeys(row["attention"] for row in own))
        layers = ", ".join(sorted({str(row["layers"]) for row in own}))
        what = "time to first token" if kind == "prefill" else "a decode step"
        parts += [f"### {model}, {what}, {layers} layers", "",
                  "| batch | tokens | " + " | ".join([*(f"{name}, ms" for name in names),
                                                      *(f"{name}, GB" for name in names)]) + " |",
                  "|---|---|" + "---|" * (2 * len(names))]
        for problem in dict.fromkeys((row["batch"], row["length"]) for row in own):
            here = {row["attention"]: row for row in own if (row["batch"], row["length"]) == problem}
            cells = [_cell(here.get(name), "ms", 1) for name in names]
            cells += [_cell(here.get(name), "peak_bytes", 1e9) for name in names]
            parts.append("| " + " | ".join([*map(str, problem), *cells]) + " |")
        parts.append("")
    return "\n".join(parts)


def _cell(row: dict[str, Any] | None, name: str, unit: float) -> str:
    if row is None:
        return "-"
    return f"{row[name] / unit:.4g}" if name in row else "no memory" if row["status"] == "out of memory" else "failed"


def picture(rows: Sequence[dict[str, Any]], path: Path) -> Path:
    """Time to the first token against the prompt, and tokens per second against what is cached at the largest batch
    that all attentions have."""
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(row["model"] for row in rows))
    figure = Figure(figsize=(11, 3.6 * len(models)), layout="constrained")
    for line, model in zip(figure.subplots(len(models), 2, squeeze=False), models, strict=True):
        for axes, (kind, unit) in zip(line, (("prefill", "ms"), ("decode", "tokens_per_s")), strict=True):
            own = [row for row in rows if (row["model"], row["kind"]) == (model, kind) and unit in row]
            shared = [batch for batch in {row["batch"] for row in own}
                      if len({row["attention"] for row in own if row["batch"] == batch}) == len(
                          {row["attention"] for row in own})]
            batch = max(shared, default=0)
            for name in dict.fromkeys(row["attention"] for row in own):
                points = sorted((row["length"], row[unit]) for row in own
                                if row["attention"] == name and row["batch"] == batch)
                axes.plot(*zip(*points, strict=True), marker="o", label=name)
            axes.set(title=f"{model}, {kind}, batch {batch}", xlabel="tokens", ylabel=unit.replace("_", " "),
                     xscale="log", yscale="log")
            lengths = sorted({row["length"] for row in own})
            axes.set_xticks(lengths, [f"{length // 1024}k" for length in lengths])
            axes.minorticks_off()
            if own:
                axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    return path


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path, help="folder of results")
    parser.add_argument("--model", choices=[*CONFIGS], action="append", help="by default all; may be repeated")
    parser.add_argument("--layers", type=int, help="fewer than the model has; the results say how many")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small layers, whose logits are compared")
    parser.add_argument("--resume", action="store_true", help="leave out rows that the results have")
    parser.add_argument("--rows", type=Path, help="results to show; nothing runs")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--table", type=Path, help="a file for the markdown table, which is printed besides")
    parser.add_argument("--commit", help="of the code, where no checkout can be asked")
    options = parser.parse_args(arguments)
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu runs with --tiny alone: a whole model takes hours there")
    if options.layers is not None and options.layers < 1:
        parser.error("--layers: whole numbers from 1")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(arguments)
    if options.rows:
        show(json.loads(options.rows.read_text(encoding="utf-8"))["rows"], options)
        return
    configs = [CONFIGS[name] for name in options.model or CONFIGS]
    if options.layers:
        configs = [replace(config, layers=min(config.layers, options.layers)) for config in configs]
    if options.tiny:
        rows = [row for config in configs for row in compare(tiny(config), options.device)]
        facts: dict[str, Any] = {"gpu": options.device, "driver": None, "versions": {"flashgen": __version__}}
        for row in rows:
            print(f"{row['model']}, {row['kind']}, {row['attention']}: {row['apart']:.1e} of the largest logit")
    else:
        from flashgen.runtime.measure.device import CudaDevice

        facts = CudaDevice().facts()
        rows = rows_there(options.out, facts["gpu"]) if options.resume else []

    def store(found: list[dict[str, Any]]) -> None:
        if options.out:
            write_results(document(facts, options.commit, rounds=ROUNDS, rows=found), options.out, NAME)

    if options.tiny:
        store(rows)
        return
    with torch.no_grad():
        run(configs, [task for config in configs for task in tasks_of(config)], rows, row_of, store)
    show(rows, options)


def show(rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    text = table(rows)
    print(text)
    if options.table:
        options.table.write_text(text, encoding="utf-8")
    if options.picture:
        print(picture(rows, options.picture), file=sys.stderr)


if __name__ == "__main__":
    main()
