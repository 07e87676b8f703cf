"""The package as others install it: every file is inside, and the sdist builds the wheel that the checkout builds."""
from __future__ import annotations

import email
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import flashgen

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
LINKS = ("codegen", "runtime", "specs", "templates")  # flashgen/NAME leads to NAME
BACKEND = "import sys; from setuptools import build_meta; getattr(build_meta, 'build_' + sys.argv[1])(sys.argv[2])"


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A copy of what git knows of the checkout, or would add: a build in the checkout leaves folders there, and takes
    deleted modules from those that an earlier build left."""
    listed = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], capture_output=True,
                            text=True, cwd=ROOT)
    if listed.returncode:
        pytest.skip("not a git checkout")
    copy = tmp_path_factory.mktemp("tree")
    for name in listed.stdout.splitlines():
        if (ROOT / name).exists():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
    return copy


@pytest.fixture(scope="module")
def sdist(tree, tmp_path_factory) -> Path:
    """The sdist of the checkout, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    build("sdist", tree, folder)
    [archive] = folder.iterdir()
    with tarfile.open(archive) as file:
        file.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return folder / f"flashgen-{flashgen.__version__}"


@pytest.fixture(scope="module")
def wheel(tree, tmp_path_factory) -> dict[str, bytes]:
    """Name -> contents of each file of the checkout's wheel."""
    return wheel_of(tree, tmp_path_factory.mktemp("wheel"))


def build(what: str, source: Path, folder: Path) -> None:
    command = [sys.executable, "-c", BACKEND, what, str(folder)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def wheel_of(source: Path, folder: Path) -> dict[str, bytes]:
    build("wheel", source, folder)
    [path] = folder.glob("*.whl")
    with zipfile.ZipFile(path) as file:
        return {name: file.read(name) for name in file.namelist() if not name.endswith("/")}


def test_wheel_holds_every_file_of_the_package(tree, wheel):
    """And nothing else: a template that package-data forgets is missed only when a kernel is rendered."""
    own = {path for path in (tree / "flashgen").rglob("*") if path.is_file()}
    linked = {path for name in LINKS for path in (tree / name).rglob("*") if path.is_file()}
    expected = {path.relative_to(tree).as_posix() for path in own if path.relative_to(tree).parts[1] not in LINKS}
    expected |= {f"flashgen/{path.relative_to(tree).as_posix()}" for path in linked}
    assert {name for name in wheel if name.startswith("flashgen/")} == expected


def test_sdist_builds_the_same_wheel(sdist, wheel, tmp_path):
    """The links are folders in the sdist. RECORD and METADATA are compared as well, so the LICENSE is in both."""
    assert not [path for path in sdist.rglob("*") if path.is_symlink()]
    again = wheel_of(sdist, tmp_path)
    assert again.keys() == wheel.keys()
    # setuptools lists files in RECORD as the file system gives them.
    assert [name for name in wheel if sorted(again[name].splitlines()) != sorted(wheel[name].splitlines())] == []


def test_metadata_is_complete(wheel):
    folder = f"flashgen-{flashgen.__version__}.dist-info"
    said = email.message_from_bytes(wheel[f"{folder}/METADATA"])
    assert said["Version"] == flashgen.__version__
    assert said["License-Expression"] == "Apache-2.0"
    assert wheel[f"{folder}/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()
    for field in ("Summary", "Author", "Keywords", "Classifier", "Requires-Python", "Description-Content-Type"):
        assert said[field], field
    assert b"flashgen = flashgen.cli:main" in wheel[f"{folder}/entry_points.txt"]


def test_versions_agree():
    """CITATION.cff cannot take the version from the package."""
    assert f"version: {flashgen.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
