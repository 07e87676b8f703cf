"""What a command loads and starts before it answers. Modules and processes are counted: times depend on the machine."""
from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tiny import CUBIN

import flashgen
from flashgen.codegen.render import plan_and_source
from flashgen.codegen.spec.spec import load_specs, spec_path
from flashgen.runtime import doctor
from flashgen.runtime.compile.entry import Entry
from flashgen.runtime.select.bundle import write_bundle

ROOT = str(Path(flashgen.__file__).parent.parent)
HEAVY = {"torch", "numpy", "matplotlib", "rich", "hypothesis", "elftools"}
COMPILER, TEMPLATES, YAML = {"cuda", "filelock"}, {"jinja2"}, {"yaml"}
# command -> what of the above it loads beyond the rest of the command line
NEEDS: dict[str, set[str]] = {
    "--version": set(), "--help": set(), "cache ls": set(),
    "list": YAML, "list fa2_fwd": YAML, "schema": YAML, "schema --docs": YAML, "new mine": YAML, "check alibi": YAML,
    "tune fa2_fwd --dry-run": YAML,
    # The figure of registers is the cached kernel's, whose key is of the rendered source and of NVRTC.
    "explain fa2_fwd": YAML | TEMPLATES | {"cuda"}, "explain mla_h100": YAML | TEMPLATES | {"cuda"},
    "doctor": YAML,
}
MAIN = """if True:
    import sys
    from flashgen.cli import main
    try:
        main()
    except SystemExit as end:
        code = end.code or 0
    print("", *sys.modules, file=sys.stderr)
    sys.exit(code)
"""


def loaded(command: str, tmp_path: Path, **environment: str) -> tuple[set[str], subprocess.CompletedProcess[str]]:
    """(packages that a process of this command has loaded at its end, the process)."""
    env = {**os.environ, "PYTHONPATH": ROOT, "FLASHGEN_CACHE_DIR": str(tmp_path / "cache"), **environment}
    ended = subprocess.run([sys.executable, "-c", MAIN, *command.split()], env=env, cwd=tmp_path, capture_output=True,
                           text=True, timeout=300)
    assert "Traceback" not in ended.stderr, ended.stderr
    return {name.partition(".")[0] for name in ended.stderr.splitlines()[-1].split()}, ended


@pytest.mark.parametrize("command", NEEDS)
def test_what_a_command_loads(command: str, tmp_path: Path) -> None:
    found, ended = loaded(command, tmp_path)
    assert ended.returncode == 0 and found & (HEAVY | COMPILER | TEMPLATES | YAML) <= NEEDS[command], ended.stderr


@pytest.mark.parametrize("command", ["verify fa2_fwd", "bench fa2_fwd", "bench mla_h100", "tune fa2_fwd"])
def test_no_gpu_is_told_before_torch_is_loaded(command: str, tmp_path: Path) -> None:
    """CUDA_VISIBLE_DEVICES hides the devices of machines that have some."""
    found, ended = loaded(command, tmp_path, CUDA_VISIBLE_DEVICES="")
    assert ended.returncode == 8 and "no CUDA device" in ended.stderr and "next: flashgen doctor" in ended.stderr
    assert "cuda" in found and not found & HEAVY


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The questions for which doctor would start a process."""
    questions: list[str] = []

    def ask(question: str) -> dict[str, Any]:
        questions.append(question)
        return {"error": "not asked", "next": ""}

    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(doctor, "_ask", ask)
    return questions


def test_doctor_asks_each_question_once(asked: list[str]) -> None:
    doctor.examine()
    assert sorted(asked) == ["driver", "nvrtc", "torch"]


def test_doctor_starts_nothing_for_a_torch_that_is_not_installed(asked: list[str],
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor.importlib.util.find_spec
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None if name == "torch" else real(name))
    finding = next(f for f in doctor.examine().findings if f.name == "torch")
    assert sorted(asked) == ["driver", "nvrtc"]
    assert (finding.status, finding.detail, finding.needed_for) == ("fail", "not installed", "run")


def test_doctor_asks_side_by_side(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No answer comes before all questions are asked, so that asking one after the other would break the barrier."""
    together = threading.Barrier(len(doctor.ASKING), timeout=300)

    def ask(question: str) -> dict[str, Any]:
        together.wait()
        return {"error": f"the answer to {question}", "next": ""}

    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(doctor, "_ask", ask)
    told: list[tuple[int, str]] = []
    report = doctor.examine(lambda done, what: told.append((done, what)))
    details = {finding.name: finding.detail for finding in report.findings}
    assert [details[name] for name in doctor.ASKING] == [f"the answer to {name}" for name in doctor.ASKING]
    assert told == list(enumerate(doctor.PROBES))


# ---- calls that a bundle serves

SERVED = {"fa2_fwd": "fa2_fwd_bf16_d64_window", "fa3_fwd": "fa3_fwd_bf16_d128_split_packed",
          "mla_h100": "mla_h100_bf16_d576v512_paged64", "mla_h100 ": "mla_h100_schedule"}
# Up to the launch, which needs a device: tensors are on the CPU, and the kernels are taken for one of an H100.
CALLS = """if True:
    import sys
    for name in ("pydantic", "jinja2", "yaml", "flashgen.codegen.spec.spec", "flashgen.codegen.spec.fields",
                 "flashgen.codegen.render"):
        sys.modules[name] = None
    import torch
    from types import SimpleNamespace
    import flashgen
    from flashgen.runtime.ops import front
    from flashgen.runtime.ops.attention import call as attention
    from flashgen.runtime.ops.mla_decode import call as decode, schedule
    from flashgen.runtime.select import lookup

    def kernel_for(wanted, device, sizes=None):
        return lookup.registry.kernel(wanted if sizes is None else lookup.registry.for_sizes(wanted, 0, sizes), 0)

    def bind(program, kernels, names, device):
        print(*(kernels[step.kernel].plan.variant for step in program.steps))
        return lambda tensors: None

    lookup.device_facts = lambda index: SimpleNamespace(cc=90, num_sms=132)
    lookup.loaded = lambda plan, image, index: SimpleNamespace(plan=plan, num_sms=132)
    front.kernel_for = decode.kernel_for = schedule.kernel_for = kernel_for
    front.bind = bind
    flashgen.load_bundle(sys.argv[1])
    q, k = torch.zeros(1, 1, 8, 128).bfloat16(), torch.zeros(1, 8192, 1, 128).bfloat16()
    flashgen.attention(q, k, k)
    x = torch.zeros(1, 9, 8, 64).bfloat16()
    flashgen.attention(x, x, x, window=(0, 0), return_lse=True)
    q, cache = torch.zeros(1, 1, 8, 576).bfloat16(), torch.zeros(4, 64, 576).bfloat16()
    lengths, table = torch.tensor([9], dtype=torch.int32), torch.zeros(1, 4, dtype=torch.int32)
    kept = flashgen.mla_schedule(lengths, 8)
    for schedule in (None, kept):
        flashgen.mla_decode(q, cache, lengths, page_table=table, schedule=schedule)
"""


def test_a_bundle_serves_without_specs_and_what_reads_them(tmp_path: Path) -> None:
    specs = [next(spec for spec in load_specs(spec_path(name.strip())).specs
                  if spec.variant == variant and spec.arch.startswith("sm_90")) for name, variant in SERVED.items()]
    write_bundle([Entry(f"{i:064x}", CUBIN, plan_and_source(spec)[0], "// text", None, False)
                  for i, spec in enumerate(specs)], tmp_path / "b")
    done = subprocess.run([sys.executable, "-c", CALLS, str(tmp_path / "b")], capture_output=True, text=True, cwd=ROOT,
                          timeout=300)
    assert not done.returncode, done.stderr
    assert done.stdout.splitlines() == [
        SERVED["fa3_fwd"], SERVED["fa2_fwd"], "mla_h100_schedule", f"mla_h100_schedule {SERVED['mla_h100']}",
        SERVED["mla_h100"]]
