"""Ops are found by name in processes that never called flashgen, and programs carry the specs that they name."""
from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.export import Dim

import flashgen
from flashgen.codegen.spec.spec import Spec
from flashgen.errors import SpecError, UnsupportedError
from flashgen.runtime.select.handles import handle_of, opened
from flashgen.runtime.select.variant import Variant

ROOT = Path(__file__).resolve().parents[2]
SLOPED = flashgen.variant("c * score - slope[head_q]", params={
    "c": {"type": "float", "default": 1.0},
    "slope": {"type": "tensor", "dtype": "float32", "shape": ["num_heads_q"]}})
DOUBLED = Spec(**{"name": "doubled", "family": "fa2", "pass": "fwd", "arch": "sm_90", "dtype": "bf16",
                  "head_dim_qk": 64, "score": "2.0 * score", "tile": {"m": 64, "n": 32}})


def run(code: str, *arguments: object) -> str:
    """What a new process prints."""
    done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, cwd=ROOT)
    assert not done.returncode, done.stderr
    return done.stdout


class Model(torch.nn.Module):
    def forward(self, q: torch.Tensor, slope: torch.Tensor) -> tuple[torch.Tensor, ...]:
        one = flashgen.attention(q, q, q, spec=SLOPED, params={"c": 2.0, "slope": slope})
        two, lse = flashgen.attention(q, q, q, spec=DOUBLED, return_lse=True)
        three = flashgen.attention(q, q, q, spec="softcap", causal=True)
        return one, two, lse, three, flashgen.attention(q, q, q, window=(3, 0), softmax_scale=0.2)


@pytest.mark.parametrize("strict", [False, True])
def test_b117_programs_run_in_another_process(strict: bool, tmp_path: Path) -> None:
    """It imports flashgen and torch and calls nothing of flashgen's (B128)."""
    q, slope = torch.randn(1, 20, 2, 64).bfloat16(), torch.rand(2)
    program = torch.export.export(Model(), (q, slope), strict=strict,
                                  dynamic_shapes=({1: Dim("seqlen", min=2, max=99)}, None))
    torch.export.save(program, tmp_path / "program.pt2")
    inputs = [(q, slope), (torch.randn(1, 33, 2, 64).bfloat16(), slope)]
    torch.save([(given, Model()(*given)) for given in inputs], tmp_path / "results.pt")
    assert run("import sys, flashgen, torch\n"
               "model = torch.export.load(sys.argv[1]).module()\n"
               "for given, results in torch.load(sys.argv[2]):\n"
               "    print([torch.equal(*pair) for pair in zip(model(*given), results, strict=True)])",
               tmp_path / "program.pt2", tmp_path / "results.pt") == f"{[True] * 5}\n" * 2


@pytest.mark.parametrize("imports", ["import flashgen, torch", "import torch, flashgen",
                                     "import flashgen, importlib.util as u; u.find_spec('torch'); import torch"])
def test_b128_ops_are_there_after_the_imports(imports: str) -> None:
    """What runs them is not imported yet, and the watch for torch is over."""
    out = run(f"{imports}\nimport sys\n"
              "names = ['attention', 'attention_out_lse_dynamic', 'mla_decode_lse', 'mla_schedule']\n"
              "print([getattr(torch.ops.flashgen, name).default._schema.name for name in names])\n"
              "print([m for m in sys.modules if m.startswith('flashgen.runtime')])\n"
              "print([f for f in sys.meta_path if type(f).__module__.startswith('flashgen')])")
    assert "flashgen::mla_decode_lse" in out
    modules, finders = out.splitlines()[1:]
    assert not re.findall(r"flashgen\.runtime\.(?!ops)\w+|\w*\.(?:front|call|schedule)'", modules) and finders == "[]"


def test_b128_without_torch_or_with_one_that_fails(tmp_path: Path) -> None:
    """An import of torch fails as without flashgen; one that succeeds later has the ops."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise ImportError('half installed')")
    out = run("import sys; sys.path.insert(0, sys.argv[1])\n"
              "import flashgen\n"
              "for _ in range(2):\n"
              "    try: import torch\n"
              "    except ImportError as error: print(error)\n"
              "sys.path.remove(sys.argv[1]); import torch\n"
              "print(torch.ops.flashgen.attention)", tmp_path)
    assert out == "half installed\nhalf installed\nflashgen.attention\n"
    out = run("import sys\nclass Nothing:\n    find_spec = staticmethod(lambda name, *_: None)\n"
              "import flashgen\nsys.meta_path[1:] = [Nothing]\n"
              "try: import torch\nexcept ModuleNotFoundError as error: print(error)")
    assert out == "No module named 'torch'\n"


# ---- handles: specs as text

def test_a_handle_gives_back_what_it_names() -> None:
    tiled = flashgen.variant(mask="q_pos - kv_pos < w", params={"w": {"type": "int", "default": 3}}, sink="per_head",
                             family="fa2", tile={"m": 64, "n": 32}, kv_layout="varlen", name="tiled")
    for variant in (SLOPED, tiled):
        again = opened(variant.handle)
        assert isinstance(again, Variant) and again == variant and again.handle == variant.handle
    for spec in (DOUBLED, DOUBLED.with_(score="none", causal=True, head_dim_v=128)):
        assert opened(handle_of(spec)) == (spec,) and handle_of(spec) == handle_of(spec.with_())


@pytest.mark.parametrize("text", [
    "variant {", "variant []", "spec {}", 'variant {"score":"import os"}', "spec " + "[" * 10**5,
    'variant {"score": 5}', 'variant {"nothing": 1}'], ids=lambda text: text[:20])
def test_hostile_handles(text: str) -> None:
    with pytest.raises(SpecError):
        opened(text)


# ---- files

TEXT = "name: ed\nfamily: fa2\npass: fwd\narch: sm_90\ndtype: bf16\nhead_dim_qk: 64\nscore: score * %s\n"


def test_b124_files_by_folder_and_reload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 20, 2, 64).bfloat16()

    def call(spec: str | Path) -> torch.Tensor:
        return flashgen.attention(q, q, q, spec=spec)

    by_factor = {factor: call(flashgen.variant(f"score * {factor}")) for factor in (1.0, 5.0, 9.0)}
    for folder, factor in (("a", 1.0), ("b", 5.0)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "ed.yaml").write_text(TEXT % factor)
    monkeypatch.chdir(tmp_path / "a")
    assert torch.equal(call("ed.yaml"), by_factor[1.0])
    monkeypatch.chdir(tmp_path / "b")
    assert torch.equal(call("ed.yaml"), by_factor[5.0]) and torch.equal(call(Path("../a/ed.yaml")), by_factor[1.0])
    Path("ed.yaml").write_text(TEXT % 9.0)
    assert torch.equal(call("ed.yaml"), by_factor[5.0])  # a file is read once
    flashgen.reload()
    assert torch.equal(call("ed.yaml"), by_factor[9.0]) and torch.equal(call(tmp_path / "b/ed.yaml"), by_factor[9.0])


def test_b124_names_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert handle_of("softcap") == handle_of("softcap.yaml") == "softcap"
    with pytest.raises(SpecError, match="no such file"):
        flashgen.attention(*[torch.zeros(1, 2, 1, 64).bfloat16()] * 3, spec="missing.yaml")
    (tmp_path / "missing.yaml").write_text(TEXT % 2.0)  # what was not there is looked for again
    assert flashgen.attention(*[torch.zeros(1, 2, 1, 64).bfloat16()] * 3, spec="missing.yaml").shape == (1, 2, 1, 64)
    (tmp_path / "softcap").mkdir()
    (tmp_path / "softcap.yaml").write_text(TEXT % 2.0)
    flashgen.reload()
    assert handle_of("softcap") == "softcap" and handle_of("softcap.yaml") == str(tmp_path / "softcap.yaml")


def test_what_names_no_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for spec in (5, b"fa2_fwd", ["fa2_fwd"], {}):
        with pytest.raises(UnsupportedError, match=r"(?s)spec is of type.*allowed: the name of a shipped spec"):
            handle_of(spec)  # type: ignore[arg-type]
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(SpecError, match=r"(?s)working directory.*an absolute path"):
        handle_of("ed.yaml")
    assert handle_of("softcap") == "softcap"


def test_a_call_asks_nothing_of_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path costs one question for the working directory; names and absolute paths cost none."""
    path = tmp_path / "ed.yaml"
    path.write_text(TEXT % 1.0)
    monkeypatch.chdir(tmp_path)
    specs = ("softcap", str(path), path, "ed.yaml")
    for spec in specs:
        handle_of(spec)
    asked: list[str] = []
    getcwd = os.getcwd
    monkeypatch.setattr(os, "getcwd", lambda: (asked.append("getcwd"), getcwd())[1])
    monkeypatch.setattr(os, "stat", lambda *_, **__: asked.append("stat"))
    assert [len(asked) for spec in specs if handle_of(spec)] == [0, 0, 0, 1]
