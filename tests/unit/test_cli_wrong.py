"""Wrong arguments, and answers that cannot be written, end every command in one message and a known exit code."""
from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import flashgen
from flashgen import errors
from flashgen.cli.app import app
from flashgen.cli.common import INTERRUPTED, READER_LEFT, Output, command
from flashgen.codegen.explain.counts import parse_shape
from flashgen.errors import UnsupportedError

ROOT = str(Path(flashgen.__file__).parent.parent)
TINY = "tiny.yaml"  # one variant, the quickest to compile
CODES = {2, *(kind.exit_code for kind in vars(errors).values()
              if isinstance(kind, type) and issubclass(kind, errors.FlashgenError))}
LONG = "x" * 5000

# In a folder of its own. A test may run as root, who may read any file: memory at address 0 cannot be read by anyone.
FILES = {"empty.yaml": b"", "binary.yaml": bytes(range(256)) * 9, "latin.yaml": b"a: \xff\n", "nul.yaml": b"\0\0",
         "deep.yaml": b"[" * 100_000, "large.yaml": b"a: 1\n" * 10**5, "list.yaml": b"[1]", "date.yaml": b"2024-99-99"}
NO_FILE = ["nosuch.yaml", "nosuch/x.yaml", "folder", ".", "empty.yaml/x", "/proc/self/mem", "/dev/full", LONG, "a\0b",
           "\udcff.yaml", "", *FILES]
NO_PLACE = ["folder", "empty.yaml/x", "/proc/nosuch", LONG]
# command -> what follows its spec
ONE_SPEC: dict[str, list[str]] = {
    "build": [], "bundle": ["-o", "out"], "explain": [], "check": [], "verify": [], "bench": [], "tune": ["--dry-run"],
    "trace": [], "list": []}
OTHER_FILES = [["new", "mine", "--from", "?"], ["bench", TINY, "--problem-grid", "?"],
               ["bench", "--problem-grid", "?"]]
PLACES = [["schema", "-o", "?"], ["check", "alibi", "--png", "?"], ["bundle", TINY, "-o", "?"],
          ["build", TINY, "-o", "?"], ["build", TINY, "--sources-only", "-o", "?"],
          ["tune", TINY, "--write", "spec", "?"], ["tune", TINY, "--write", "table", "?"]]
VALUES = [
    ["explain", TINY, "--problem", "?"], ["explain", TINY, "--problem", "seqlen_q=?"],
    ["explain", TINY, "--problem", "window=?,0"], ["explain", "mla_h100", "--problem", "batch=?"],
    ["tune", TINY, "--dry-run", "--problem", "seqlen_q=?"], ["tune", TINY, "--dry-run", "--top", "?"],
    ["tune", TINY, "--dry-run", "--max", "?"], ["tune", TINY, "--write", "?", "x"], ["new", "?"],
    ["list", TINY, "--variant", "?"], ["list", TINY, "--arch", "?"], ["check", "alibi", "--seqlen-q", "?"],
    ["check", "alibi", "--seqlen-kv", "?"], ["check", "alibi", "--param", "?"],
    ["check", "alibi", "--param", "slope=?"], ["build", TINY, "--jobs", "?"],
    ["trace", TINY, "--block", "?"], ["verify", TINY, "--seed", "?"],
    ["verify", TINY, "--seeds", "?"], ["bench", TINY, "--peers", "?"], ["bench", TINY, "--rounds", "?"],
    ["lineage", "--target", "?"], ["lineage", "--target", "sm_90a", "--problem", "?"],
    ["lineage", "--target", "sm_90a", "--problem", "batch=1 heads=1 head_dim=64 seqlen=?"],
    ["lineage", "--target", "sm_90a", "--problem", "batch=1 heads=1 head_dim=64 seqlen=8 window=?,0"],
    ["lineage", "--target", "sm_90a", "--problem", "batch=1 heads=? cached=8"],
    ["lineage", "--target", "sm_90a", "--seqlens", "?"], ["lineage", "--rounds", "?"],
    ["cache", "?"], ["cache", "prune", "--max-mb", "?"], ["cache", "prune", "--max-days", "?"], ["doctor", "?"],
    ["?"],
]
ALLOWED = {  # of the wrong values below, those that are right here
    ("new",): {"nan"}, ("verify", "--seed"): {"-7"}, ("check", "--param"): {"slope=-7"},
    ("prune", "--max-mb"): {"9" * 5000}, ("prune", "--max-days"): {"9" * 5000}}
WRONG = ["nosuch!", "1.5.2", "-7", "nan", "9" * 5000, "\udcff", "a\0b", "=", ","]


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache_dir: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "something").write_text("")
    (tmp_path / TINY).write_text("name: tiny\nfamily: fa2\npass: fwd\narch: sm_80\ndtype: bf16\nhead_dim_qk: 32\n")
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(cache_dir))


def refused(arguments: list[str]) -> str:
    """What the command says. It fails with a known exit code, in one message that is no traceback."""
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, SystemExit), (arguments, result.exception)
    assert result.exit_code in CODES and result.stdout == "", (arguments, result.output)
    said = re.sub(r"^.*: \d+ of \d+ done, \d+ s.*\n", "", result.stderr, flags=re.MULTILINE)  # on a slow machine
    assert said.startswith(("error: ", "Usage: ")) and "Traceback" not in said
    return said


def filled(arguments: list[str], value: str) -> list[str]:
    return [argument.replace("?", value) for argument in arguments]


def test_each_command_is_here() -> None:
    groups = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert set(groups) == {*ONE_SPEC, *(row[0] for row in (*OTHER_FILES, *PLACES, *VALUES) if row[0] != "?")}


@pytest.mark.parametrize("file", NO_FILE, ids=lambda name: ascii(name)[:16])
def test_what_is_no_spec(file: str) -> None:
    for name, more in ONE_SPEC.items():
        assert "error: " in refused([name, file, *more])
    for arguments in OTHER_FILES:
        assert "error: " in refused(filled(arguments, file))


@pytest.mark.parametrize("place", NO_PLACE, ids=lambda name: ascii(name)[:16])
@pytest.mark.parametrize("arguments", PLACES, ids=" ".join)
def test_what_is_no_place_to_write_to(arguments: list[str], place: str) -> None:
    if "--png" in arguments:
        pytest.importorskip("matplotlib")
    before = sorted(Path().iterdir())
    assert "error: " in refused(filled(arguments, place))
    assert sorted(Path().iterdir()) == before


@pytest.mark.parametrize("arguments", VALUES, ids=" ".join)
def test_wrong_values(arguments: list[str]) -> None:
    right = next((values for words, values in ALLOWED.items() if {*words} <= {*arguments}), set())
    for value in WRONG:
        asked = filled(arguments, value)
        if asked[-1] not in right:
            refused(asked)


@pytest.mark.parametrize("value", ["inf", "1e308", "1e15"])
def test_a_limit_above_all_sizes_deletes_nothing(value: str) -> None:
    for option in ("--max-mb", "--max-days"):
        result = CliRunner().invoke(app, ["cache", "prune", option, value, "--json"])
        assert result.exit_code == 0 and json.loads(result.stdout)["items"] == []


def test_sizes_of_a_problem_are_bounded() -> None:
    assert parse_shape(f"seqlen_q={2**31 - 1} window=-1,0") == {"seqlen_q": 2**31 - 1, "window": (-1, 0)}
    with pytest.raises(UnsupportedError, match="too large"):
        parse_shape(f"seqlen_q={2**31}")


# -- the frame


def frame(error: BaseException) -> typer.Typer:
    def one() -> Output:
        raise error

    own = typer.Typer(rich_markup_mode=None)
    command(own, one)
    command(own, one, "two")
    return own


def test_what_the_system_refuses_is_told_like_any_error() -> None:
    error = OSError(28, "No space left on device", "some/file")
    result = CliRunner().invoke(frame(error), ["one"])
    assert (result.exit_code, result.stdout) == (8, "")
    assert result.stderr.splitlines()[0] == "error: some/file: No space left on device"
    found = json.loads(CliRunner().invoke(frame(error), ["one", "--json"]).stdout)["error"]
    assert (found["type"], found["where"], found["exit_code"]) == ("EnvironmentError_", "some/file", 8)


def test_contracts_list_every_error_with_its_exit_code() -> None:
    page = Path(ROOT, "docs", "contracts.md").read_text(encoding="utf-8")
    listed = {name: int(code) for name, code in re.findall(r"^\| `(\w+)` \| (\d+) \|", page, re.MULTILINE)}
    assert listed == {name: kind.exit_code for name, kind in vars(flashgen.errors).items()
                      if isinstance(kind, type) and issubclass(kind, flashgen.errors.FlashgenError)}
    for code in (INTERRUPTED, READER_LEFT):
        assert f"exit code {code}" in page


def test_an_interrupt_is_one_word() -> None:
    result = CliRunner().invoke(frame(KeyboardInterrupt()), ["one"])
    assert (result.exit_code, result.output) == (INTERRUPTED, "interrupted\n")


# -- where the answer goes


def process(command_line: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": ROOT, "flashgen": f"{sys.executable} -m flashgen"}
    return subprocess.run(["bash", "-c", command_line], env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("arguments", ["list", "list fa2_fwd", "schema --json", "list nosuch --json"])
def test_a_reader_that_leaves(arguments: str) -> None:
    ended = process(f"$flashgen {arguments} | true; exit ${{PIPESTATUS[0]}}")
    assert (ended.returncode, ended.stdout, ended.stderr) == (READER_LEFT, "", "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no device that is always full")
@pytest.mark.parametrize("arguments", ["list", "schema --json", "--help", "--version"])
def test_an_answer_that_cannot_be_written(arguments: str) -> None:
    ended = process(f"$flashgen {arguments} > /dev/full")
    assert (ended.returncode, ended.stderr) == (8, "error: standard output: No space left on device\n")


@pytest.mark.parametrize(("arguments", "code"), [("list fa2_fwd", 0), ("schema --json", 0), ("list nosuch", 2)])
def test_outputs_that_are_closed(arguments: str, code: int) -> None:
    for closed in (">&-", "2>&-", ">&- 2>&-"):
        ended = process(f"$flashgen {arguments} {closed}")
        assert ended.returncode == code and "Traceback" not in ended.stderr
        assert "error" not in ended.stdout  # which is no place for messages


def test_names_that_the_encoding_lacks() -> None:
    ended = process("export LC_ALL=C PYTHONIOENCODING=ascii; $flashgen explain fa3_fwd > text && "
                    "$flashgen schema -o $'\\xff'")
    assert ended.returncode == 0 and "\\udcff" in ended.stdout, ended.stderr


def heed_interrupts() -> None:
    """A run in the background of a script has SIGINT ignored, and so have its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A command that reads a spec which nobody writes."""
    os.mkfifo(tmp_path / "fifo.yaml")
    env = {**os.environ, "PYTHONPATH": ROOT}
    child = subprocess.Popen([sys.executable, "-m", "flashgen", "list", "fifo.yaml"], env=env, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=heed_interrupts)
    yield child
    child.kill()
    child.wait()


def test_ctrl_c(waiting: subprocess.Popen[str], tmp_path: Path) -> None:
    writer: Any = os.open(tmp_path / "fifo.yaml", os.O_WRONLY)  # returns when the command has opened the other end
    waiting.send_signal(signal.SIGINT)
    out, err = waiting.communicate(timeout=300)
    os.close(writer)
    assert (waiting.returncode, out, err) == (INTERRUPTED, "", "interrupted\n")
