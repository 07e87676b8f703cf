"""`flashgen lineage`: every generation of attention on one problem, what its tiles predict beside what is measured.

An operation lists its generations (Lineage, in runtime/ops/<operation>/lineage.py): the families that answer it in the
order of Family.generation, and baselines that no family has. Running out of memory is a result of a row, and so is a
refusal. Nothing here touches a GPU; tests bring a stand-in for the device.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast

from flashgen import __version__
from flashgen.codegen.explain.cost import Cost
from flashgen.codegen.explain.counts import MAX_SIZE
from flashgen.codegen.target import TARGETS
from flashgen.codegen.target import Device as Card
from flashgen.errors import FlashgenError, SpecError, UnsupportedError, nearest_word
from flashgen.runtime.measure.bench import Call, Device, Refused, Run, digits, document, interleave, repeated
from flashgen.runtime.measure.grid import Axis, combinations

if TYPE_CHECKING:
    from flashgen.codegen.spec.spec import Spec

FORWARD, STEP = "fwd", "fwd+bwd"  # what of a generation is timed: a forward, or one with the gradients behind it
OK, PREDICTED, OUT_OF_MEMORY, REFUSED = "ok", "predicted", "out of memory", "refused"  # of a row


@dataclass(frozen=True)
class Generation:
    """One way to answer a problem. With `refused`, why there is none."""

    name: str
    story: str
    passes: str = FORWARD
    specs: tuple[Spec, ...] = ()  # of the forward and, for a step, of the backward; a baseline has none
    flops: int = 0                # that the problem asks of it, a multiply-add as two: of visible pairs
    tensor_bytes: int = 0         # inputs and results
    cost: Cost | None = None      # None: nobody counts it
    refused: str = ""

    @property
    def variant(self) -> str:
        return ", ".join(f"{spec.variant}.{spec.arch}" for spec in self.specs)

    def predicted(self, card: Card) -> dict[str, Any] | None:
        """As JSON has it. `ms` is a floor: at the datasheet's rates of `card`."""
        if self.cost is None:
            return None
        memory = self.tensor_bytes + self.cost.scratch_bytes
        return {"read": self.cost.read, "written": self.cost.written, "bytes": self.cost.bytes, "flops": self.flops,
                "flops_issued": self.cost.flops, "scratch_bytes": self.cost.scratch_bytes, "memory_bytes": memory,
                "fits": memory <= card.memory_bytes, "ms": digits(self.cost.ms),
                "tflops": digits(self.flops / self.cost.ms / 1e9)}


class Case(Protocol):
    @property
    def label(self) -> str: ...


class Job(Protocol):
    """A generation with inputs on the device."""

    def calls(self) -> Sequence[Call]:
        """A call for each set of inputs, once the first has run and was looked at."""

    def held_bytes(self) -> int:
        """Of the tensors of one set that are there before a call."""

    def error(self) -> float:
        """Of the first call's result against fp64, relative norm over a few batches and heads."""


class Timed(Protocol):
    """What of a lineage needs torch: functions of a module."""

    def inputs(self, device: Any, case: Any, past_l2: bool = True) -> Any:
        """As many sets as rotate past L2, or one."""

    def job(self, case: Any, generation: Generation, inputs: Any) -> Job: ...


class MeasuringDevice(Device, Protocol):
    out_of_memory: type[Exception]

    def peak_bytes(self, call: Call) -> int:
        """The most memory that is allocated while the call runs, less what was before."""


class Lineage:
    """The generations of one operation."""

    stem: ClassVar[str]                    # of the results' file
    words: ClassVar[Mapping[str, str]]     # short words of a problem, each with the key of a grid that it stands for
    axes: ClassVar[Mapping[str, Axis]]     # the keys of a grid
    sweep: ClassVar[str]                   # the key of which several values make a picture
    module: ClassVar[str]                  # a Timed

    def case(self, values: dict[str, Any], where: str) -> Any:
        raise NotImplementedError

    def generations(self, case: Any, archs: Sequence[str], num_sms: int, backward: bool) -> list[Generation]:
        """All of them, the oldest first. With `backward` each again, as a step."""
        raise NotImplementedError

    def in_json(self, case: Any) -> dict[str, Any]:
        """From which case() makes it again."""
        raise NotImplementedError

    def timed(self) -> Timed:
        return cast("Timed", import_module(self.module))

    def knows(self, names: Sequence[str]) -> bool:
        return all(name in self.words or name in self.axes for name in names)

    def cases(self, words: Mapping[str, Any], lengths: Sequence[int] = ()) -> list[Any]:
        """The cases of a problem's words, one for each of `lengths` in the place of `sweep`. SpecError or
        UnsupportedError for what makes none."""
        values: dict[str, Any] = {}
        for word, value in words.items():
            key = self.words.get(word, word)
            if key in values:
                raise UnsupportedError(f"{word} gives {key} again", where="--problem")
            values[key] = value
        if lengths:
            values[self.sweep] = list(lengths)
        return [self.case(one, "--problem") for one in combinations(values, "--problem", self.axes)]


def parse_problem(text: str) -> dict[str, Any]:
    """`batch=8 seqlen=4096 causal=true window=1024,0` as {word: value}. UnsupportedError for anything else."""
    found: dict[str, Any] = {}
    for word in text.split():
        name, equals, value = word.partition("=")
        if not (name and equals and value) or name in found:
            raise UnsupportedError(f"{word!r}{' gives it again' if name in found else ''}", where="--problem",
                                   allowed="name=value, once for each", nearest="batch=8 seqlen=4096 causal=true")
        found[name] = _value(value)
    return found


def _value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        return text
    if max(map(abs, numbers)) > MAX_SIZE:
        raise UnsupportedError(f"{text} is too large", where="--problem", allowed=f"numbers up to {MAX_SIZE}")
    return numbers if len(numbers) > 1 else numbers[0]


def parse_lengths(text: str) -> list[int]:
    """`1024,2048` as numbers. UnsupportedError for anything else."""
    try:
        found = [int(part) for part in text.split(",")] if text else []
    except ValueError:
        found = [0]
    if not all(1 <= length <= MAX_SIZE for length in found):
        raise UnsupportedError(f"{text[:40]!r}", where="--seqlens", nearest="1024,2048,4096",
                               allowed=f"whole numbers from 1 to {MAX_SIZE}, with commas between")
    return found


def lineage_for(names: Sequence[str], known: Sequence[Lineage]) -> Lineage:
    """The first of the lineages that has all words of a problem."""
    for lineage in known:
        if lineage.knows(names):
            return lineage
    words = [word for lineage in known for word in lineage.words]
    unknown = next((name for name in names if not any(lineage.knows([name]) for lineage in known)), "")
    raise UnsupportedError(f"unknown word {unknown}" if unknown else f"the words {', '.join(names)} are of no one "
                           "operation", where="--problem", nearest=nearest_word(unknown, words),
                           allowed="; ".join(" ".join(lineage.words) for lineage in known))


@functools.cache
def shipped_specs() -> tuple[Spec, ...]:
    """The variants of every shipped spec file: a second's work."""
    from flashgen.codegen.spec.spec import load_specs, shipped_spec_paths

    return tuple(spec for path in shipped_spec_paths() for spec in load_specs(path).specs)


# -- rows


def row(lineage: Lineage, case: Any, generation: Generation, card: Card, status: str, why: str = "",
        measured: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A row of the results. `measured` is {} unless it was."""
    return {"case": lineage.in_json(case), "label": case.label, "length": lineage.in_json(case)[lineage.sweep],
            "generation": generation.name, "story": generation.story, "passes": generation.passes,
            "variant": generation.variant, "status": status, "why": why,
            "predicted": None if generation.refused else generation.predicted(card), "measured": dict(measured or {})}


def title_of(row: Mapping[str, Any]) -> str:
    """The generation, and what of it is timed where that is more than a forward."""
    return str(row["generation"]) + ("" if row["passes"] == FORWARD else f" {row['passes']}")


def results_of(facts: Mapping[str, Any], card: Card, target: str, lineage: Lineage, rows: list[dict[str, Any]],
               given_commit: str | None = None) -> dict[str, Any]:
    roof = {"name": card.name, "bf16_tflops": card.bf16_tflops, "memory_gbps": card.memory_gbps,
            "memory_bytes": card.memory_bytes, "l2_bytes": card.l2_bytes}
    return document(facts, given_commit, target=target, card=roof, sweep=lineage.sweep, rows=rows)


def predict(lineage: Lineage, cases: Sequence[Any], target: str, *, backward: bool = False,
            given_commit: str | None = None) -> dict[str, Any]:
    """The half that needs no GPU: bytes, FLOPs, floors and memory on the card of a target. SpecError for another."""
    from flashgen.runtime.select.lookup import archs_for

    if target not in TARGETS:
        raise SpecError(f"no target {target}", where="--target", allowed=", ".join(TARGETS),
                        nearest=nearest_word(target, TARGETS))
    card = TARGETS[target].device
    rows: list[dict[str, Any]] = []
    archs = [target, *(arch for arch in archs_for(TARGETS[target].cc) if arch != target)]
    for case in cases:
        for generation in lineage.generations(case, archs, card.num_sms, backward):
            predicted = generation.predicted(card)
            status = (REFUSED if generation.refused else OUT_OF_MEMORY if predicted and not predicted["fits"]
                      else PREDICTED)
            rows.append(row(lineage, case, generation, card, status, generation.refused))
    facts = {"gpu": card.name, "driver": None, "versions": {"flashgen": __version__}}
    return results_of(facts, card, target, lineage, rows, given_commit)


def measure(device: MeasuringDevice, lineage: Lineage, cases: Sequence[Any], *, backward: bool = False, rounds: int,
            progress: Callable[[int, str], None] = lambda done, what: None,
            counters: Callable[[Any, Generation], Mapping[str, int]] | None = None,
            store: Callable[[dict[str, Any]], object] = lambda results: None, given_commit: str | None = None
            ) -> dict[str, Any]:
    """All generations on all cases, those of a case interleaved. `store` gets the results after each case. `counters`
    gives the bytes that a call reads and writes, where they are counted."""
    target, timed = device.archs()[0], lineage.timed()
    card = TARGETS[target].device
    rows: list[dict[str, Any]] = []

    def results() -> dict[str, Any]:
        return results_of(device.facts(), card, target, lineage, rows, given_commit)

    for done, case in enumerate(cases):
        progress(done, case.label)
        found = lineage.generations(case, device.archs(), device.num_sms, backward)
        made = _measure(device, timed, case, found, rounds)
        device.release()
        for generation, (status, why, measured) in zip(found, made, strict=True):
            if counters and status == OK:
                measured = {**measured, **counters(case, generation)}
            rows.append(row(lineage, case, generation, card, status, why, measured))
        store(results())
    progress(len(cases), "")
    return results()


_Outcome = tuple[str, str, dict[str, Any]]  # status, why, what was measured


def _measure(device: MeasuringDevice, timed: Timed, case: Any, generations: Sequence[Generation], rounds: int
             ) -> list[_Outcome]:
    outcomes: list[_Outcome] = [(REFUSED, generation.refused, {}) for generation in generations]
    runs, held = dict[str, Run](), []  # graphs hold no tensors, but calls do
    inputs, status, why = _tried(device, lambda: timed.inputs(device, case))
    for number, generation in enumerate(generations):
        if generation.refused:
            continue
        if inputs is None:
            outcomes[number] = status, why, {}
            continue
        found, *told = _tried(device, functools.partial(_prepared, device, timed, case, generation, inputs))
        outcomes[number] = told[0], told[1], found[1] if found else {}
        if found:
            runs[str(number)] = found[0]
            held.append(found[2])
        device.release()
    for key, ms in (interleave(runs, rounds) if runs else {}).items():
        number, cost = int(key), generations[int(key)].cost
        measured = {"ms": digits(ms), "tflops": digits(generations[number].flops / ms / 1e9),
                    "gbps": digits(cost.bytes / ms / 1e6) if cost else None, **outcomes[number][2]}
        outcomes[number] = OK, "", measured
    return outcomes


def _prepared(device: MeasuringDevice, timed: Timed, case: Any, generation: Generation, inputs: Any
              ) -> tuple[Run, dict[str, Any], Sequence[Call]]:
    """What times a generation; peak memory, error and timer, which are known before; and the calls. Where no graph
    holds them, plain calls are timed, and the row says so."""
    job = timed.job(case, generation, inputs)
    calls = job.calls()
    known: dict[str, Any] = {"error": float(f"{job.error():.3g}"),
                             "peak_bytes": device.peak_bytes(calls[0]) + job.held_bytes(), "timer": device.timer}
    try:
        return device.timed(device.timer, repeated(calls)), known, calls
    except Refused:
        return device.timed("events", repeated(calls)), {**known, "timer": "events"}, calls


def _tried(device: MeasuringDevice, work: Callable[[], Any]) -> tuple[Any, str, str]:
    """(the answer or None, status, why): whatever a library raises refuses the row, and memory ends where it ends."""
    try:
        return work(), OK, ""
    except device.out_of_memory:
        return None, OUT_OF_MEMORY, ""
    except FlashgenError as err:
        return None, REFUSED, err.what
    except Exception as err:
        return None, REFUSED, f"{type(err).__name__}: {str(err).strip().partition(chr(10))[0]}"
