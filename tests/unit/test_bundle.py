"""Bundles: what comes out is what went in, damage is named, foreign folders are left alone."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tiny import FIELDS, tiny_plan, tiny_source

from flashgen.codegen.families.registry import lower
from flashgen.codegen.plan import Param
from flashgen.codegen.spec.spec import load_specs, shipped_spec_paths, spec_path
from flashgen.errors import BundleError
from flashgen.runtime.compile.cache import Cache
from flashgen.runtime.compile.entry import Entry
from flashgen.runtime.launch.rehearsal import check_launch
from flashgen.runtime.select import bundle as module
from flashgen.runtime.select.bundle import Bundle, abi_digest, write_bundle
from flashgen.runtime.select.selector import Selector, selector, selector_of


@pytest.fixture(scope="module")
def entries(tmp_path_factory: pytest.TempPathFactory) -> list[Entry]:
    cache = Cache(tmp_path_factory.mktemp("cache"))
    plans = [tiny_plan("tiny_full", arch) for arch in ("sm_80", "sm_90a")]
    plans.append(tiny_plan("tiny_causal", fields={"causal": True}))
    return [cache.get_or_build(plan, tiny_source(plan)) for plan in plans]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_bundle_gives_back_plans_and_images_by_selector(entries: list[Entry], tmp_path: Path) -> None:
    out = write_bundle(entries, tmp_path / "sub" / "b")
    bundle = Bundle.load(out)
    assert set(bundle.selectors()) == {selector_of(entry.plan) for entry in entries} and len(entries) == 3
    for entry in entries:
        wanted = selector(entry.plan.spec, entry.plan.target)
        assert bundle.get(wanted) == (entry.plan, entry.cubin.image) and bundle.get(wanted) is bundle.get(wanted)
        assert bundle.resources(wanted) == entry.cubin.resources
        assert (out / f"{entry.plan.kernel_name}.cu").read_text() == entry.text
    assert bundle.get(wanted._replace(head_dim_qk=72)) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sub"] and [*out.parent.iterdir()] == [out]


def test_the_selector_holds_the_fields_a_call_decides_and_no_others() -> None:
    plan = tiny_plan()
    base = selector_of(plan)
    assert base == Selector("sm_80", "tiny", "fwd", "bf16", 64, 64, "dense", "none", False, False, True, False, ())
    absent = {"name", "page_size", "split", "pack_gqa", "deterministic", "kernel"}
    for family, traits in (
            ("tiny", ()), ("fa2", ("deterministic", "kernel")),
            ("fa3", ("pack_gqa", "split", "deterministic", "kernel")), ("flashmla", ("page_size",))):
        fields = [(name, family if name == "family" else value) for name, value in FIELDS]
        of_family = selector(fields, "sm_80")
        assert of_family == base._replace(family=family, traits=tuple((name, dict(FIELDS)[name]) for name in traits))
        for name, value in fields:
            changed = selector([(n, "other" if n == name else v) for n, v in fields], "sm_80")
            assert (changed != of_family) is (name not in absent.difference(traits)), (family, name, value)
        assert selector([*fields, ("stages", 3)], "sm_80") == of_family
        for lost in ("lse", *traits):
            with pytest.raises(KeyError):
                selector([(n, v) for n, v in fields if n != lost], "sm_80")


def test_a_bundle_is_the_same_bytes_wherever_it_is_written(entries: list[Entry], tmp_path: Path) -> None:
    assert files(write_bundle(entries, tmp_path / "a")) == files(write_bundle(entries, tmp_path / "x" / "b"))


def test_it_is_served_without_any_compiler(entries: list[Entry], tmp_path: Path) -> None:
    write_bundle(entries, tmp_path / "b")
    code = ("import sys\n"
            "for name in ('cuda', 'elftools', 'jinja2', 'filelock', 'platformdirs', 'pydantic', 'torch'):\n"
            "    sys.modules[name] = None\n"
            "from flashgen.runtime.select.bundle import Bundle\nbundle = Bundle.load(sys.argv[1])\n"
            "print(all(bundle.get(row)[1][:4] == b'\\x7fELF' for row in bundle.selectors()), len(bundle.selectors()))")
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "b")], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "3"]


DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: os.truncate(path, 50), "empty": lambda path: os.truncate(path, 0),
    "missing": lambda path: path.unlink(), "random": lambda path: path.write_bytes(bytes(range(256))),
    "flipped": lambda path: path.write_bytes(path.read_bytes()[:-40] + b"\x01" + path.read_bytes()[-39:])}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("name", ["manifest.json", "tiny_full.sm_80.cubin", "tiny_full.sm_80.plan.json"])
def test_damage_is_an_error_that_names_the_file_and_the_command(
        kind: str, name: str, entries: list[Entry], tmp_path: Path) -> None:
    out = write_bundle(entries, tmp_path / "b")
    DAMAGE[kind](out / name)
    with pytest.raises(BundleError, match=name) as caught:
        Bundle.load(out).get(selector_of(entries[0].plan))
    assert f"flashgen bundle SPEC... -o {out}" in caught.value.next
    if name != "manifest.json":  # the other kernels are still served
        assert Bundle.load(out).get(selector_of(entries[1].plan)) is not None
    write_bundle(entries, tmp_path / "c")


def test_a_folder_that_is_absent_or_no_bundle_does_not_load(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(BundleError, match=r"manifest\.json cannot be read"):
            Bundle.load(path)


@pytest.mark.parametrize("constant", ["SCHEMA", "LAUNCH_RULES"])
def test_another_schema_or_other_launch_rules_are_refused(
        constant: str, entries: list[Entry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = write_bundle(entries, tmp_path / "b")
    monkeypatch.setattr(module, constant, getattr(module, constant) + 1)
    with pytest.raises(BundleError, match="another flashgen"):
        Bundle.load(out)


def test_a_plan_that_packs_differently_here_is_refused(
        entries: list[Entry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = write_bundle(entries, tmp_path / "b")
    monkeypatch.setitem(module.CTYPES, "i32", replace(module.CTYPES["i32"], bytes=8))
    with pytest.raises(BundleError, match="packs its parameters differently"):
        Bundle.load(out).get(selector_of(entries[0].plan))


def test_the_abi_digest_follows_the_parameters() -> None:
    plan = tiny_plan()
    swapped = replace(plan, params=plan.params[::-1])
    longer = replace(plan, params=(*plan.params, Param("m", "i32", "fills the padding")))
    assert len({abi_digest(each) for each in (plan, swapped, longer)}) == 3
    assert abi_digest(replace(plan, variant="other", notes=("x",))) == abi_digest(plan)


def test_two_kernels_for_the_same_calls_are_refused_and_one_twice_is_one(entries: list[Entry], tmp_path: Path) -> None:
    rival = replace(entries[0], key="0" * 64, plan=replace(entries[0].plan, variant="tiny_full_m64n64"))
    with pytest.raises(BundleError, match=r"tiny_full\.sm_80 and tiny_full_m64n64\.sm_80 serve the same calls"):
        write_bundle([*entries, rival], tmp_path / "b")
    assert not list(tmp_path.iterdir())
    assert len(Bundle.load(write_bundle([*entries, *entries], tmp_path / "b")).selectors()) == 3


def test_an_older_bundle_is_replaced_and_an_empty_folder_filled(entries: list[Entry], tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    write_bundle(entries, tmp_path / "b")
    write_bundle(entries[:1], tmp_path / "b")
    assert len(files(tmp_path / "b")) == 4 and [*tmp_path.iterdir()] == [tmp_path / "b"]


@pytest.mark.parametrize("what", ["file", "foreign folder", "extra file", "damaged manifest"])
def test_what_is_not_a_bundle_is_left_alone(what: str, entries: list[Entry], tmp_path: Path) -> None:
    out = tmp_path / "b"
    if what == "file":
        out.write_text("precious")
    else:
        if what == "foreign folder":
            out.mkdir()
        else:
            write_bundle(entries, out)
        name = "manifest.json" if what == "damaged manifest" else "precious.txt"
        (out / name).write_text(json.dumps({"kind": "other"}))
    before = files(out) if out.is_dir() else out.read_bytes()
    with pytest.raises(BundleError, match=str(out)):
        write_bundle(entries, out)
    assert (files(out) if out.is_dir() else out.read_bytes()) == before and [*tmp_path.iterdir()] == [out]


def test_a_failing_write_leaves_the_older_bundle(entries: list[Entry], tmp_path: Path,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    out = write_bundle(entries, tmp_path / "b")
    before, real, calls = files(out), os.rename, 0

    def fails_once(source: object, target: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(28, "No space left on device")
        real(source, target)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "rename", fails_once)
    with pytest.raises(OSError, match="No space"):
        write_bundle(entries[:1], out)
    assert files(out) == before and [*tmp_path.iterdir()] == [out]


def test_a_bundle_can_be_read_by_others(entries: list[Entry], tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        out = write_bundle(entries, tmp_path / "b")
    finally:
        os.umask(old)
    assert out.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("name", [path.stem for path in shipped_spec_paths()])
def test_every_shipped_plan_passes_the_rehearsal(name: str) -> None:
    """Also those of packed sequences, whose grids have a tile to spare."""
    for spec in load_specs(spec_path(name)).specs[::7]:
        check_launch(lower(spec))
