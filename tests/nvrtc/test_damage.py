"""B134: whatever the files of a bundle or a cache entry hold, also behind right checksums, ends in our own errors."""
from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from damage import damaged_bytes, damaged_json, signed_again
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import CUBIN, IMAGE, tiny

from flashgen.codegen.families.registry import op_of, program_of
from flashgen.codegen.families.shared.launch import Sizes
from flashgen.codegen.plan import Plan
from flashgen.codegen.render import plan_and_source
from flashgen.codegen.spec.spec import load_specs, shipped_spec_paths, variant_spec_paths
from flashgen.errors import BundleError, PlanError
from flashgen.files import BadFile
from flashgen.runtime.compile import cache as cache_module
from flashgen.runtime.compile.cache import Cache
from flashgen.runtime.compile.cubin import Cubin, check_image
from flashgen.runtime.compile.entry import FILES, META, Entry, facts
from flashgen.runtime.compile.nvrtc import compile_source
from flashgen.runtime.select import lookup
from flashgen.runtime.select.bundle import MANIFEST, Bundle, abi_digest, write_bundle
from flashgen.runtime.select.lookup import Registry
from flashgen.runtime.select.selector import Wanted, selector_of

FUZZ = settings(deadline=None, max_examples=100, derandomize=True, database=None)
WANTED = [Wanted("bf16", 128, 128, True, False, "dense", True), Wanted("bf16", 64, 64, False, False, "varlen", True),
          Wanted("bf16", 576, 512, False, False, "paged", True, op="mla_decode", traits=(("page_size", 64),)),
          Wanted("bf16", 576, 512, False, False, "paged", True, op="mla_schedule", traits=(("page_size", 64),))]


def _plans() -> list[Plan]:
    """Of each family and pass one that the calls of WANTED ask for, and one with expressions."""
    shipped = [spec for path in shipped_spec_paths() for spec in load_specs(path).specs if spec.arch == "sm_90a"]
    specs = [next(spec for spec in shipped if (op_of(spec), spec.dtype, spec.head_dim_qk, spec.causal, spec.kv_layout)
                  == (w.op, w.dtype, w.head_dim_qk, w.causal, w.kv_layout)) for w in WANTED]
    softcap = next(path for path in variant_spec_paths() if path.stem == "softcap")
    return [plan_and_source(spec)[0] for spec in (*specs, load_specs(softcap).specs[0])]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    entries = [Entry(f"{i:064x}", CUBIN, plan, "// text", None, False) for i, plan in enumerate(_plans())]
    return write_bundle(entries, tmp_path_factory.mktemp("whole") / "b")


def serve(folder: Path) -> int:
    """Load a bundle and look up calls as a process with a GPU does, but for the driver. How many it served."""
    registry, served = Registry(), 0
    compiled = SimpleNamespace(plan=SimpleNamespace(kernel_name="compiled"))
    with mock.patch.object(lookup, "device_facts", lambda index: SimpleNamespace(cc=90)), \
            mock.patch.object(lookup, "loaded", lambda plan, image, index: SimpleNamespace(plan=plan)), \
            mock.patch.object(lookup, "_compiled", lambda spec, index: compiled):
        bundle = registry.load_bundle(folder)
        for wanted in WANTED:
            plan = registry.kernel(wanted, 0).plan
            if isinstance(plan, Plan):
                served += 1
                if wanted.op == "attention":
                    program_of(plan, Sizes(2, 99, 99, 4, 2), 132)
    for selector in bundle.selectors():
        bundle.get(selector)
    return served


def test_the_bundle_is_served_where_it_is_whole(bundle: Path) -> None:
    assert serve(bundle) == len(WANTED) == 4 and len(Bundle.load(bundle).selectors()) == 5


def damaged(whole: Path, changes: dict[str, bytes]) -> Path:
    """The folder of a bundle that has other files in the place of these."""
    folder = whole.parent / "damaged"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for path in whole.iterdir():
        if path.name in changes:
            (folder / path.name).write_bytes(changes[path.name])
        else:
            (folder / path.name).symlink_to(path)
    return folder


def check(whole: Path, changes: dict[str, bytes]) -> None:
    """The damaged bundle works, or BundleError says which file is wrong."""
    folder = damaged(whole, changes)
    try:
        serve(folder)
    except BundleError as err:
        assert err.where == str(folder) and err.next.startswith("flashgen bundle SPEC...")
        assert any(path.name in err.what for path in folder.iterdir()), err.what
        assert err.what.isprintable() and len(err.what) < 1000, err.what


def with_listed(whole: Path, name: str, data: bytes) -> dict[str, bytes]:
    """The changes that make a bundle list `data` as its file `name`, with all digests and the selector that fit."""
    manifest = json.loads((whole / MANIFEST).read_text())
    row, suffix = next((row, suffix) for row in manifest["kernels"] for suffix in row["files"]
                       if name == f"{row['variant']}.{row['arch']}.{suffix}")
    row["files"][suffix] = facts(data)
    if suffix == "plan.json":
        try:
            plan = Plan.from_json(data)
            row |= {"abi": abi_digest(plan), "selector": selector_of(plan)._asdict()}
        except (PlanError, KeyError):
            pass  # then no digest of it can be right
    return {name: data, MANIFEST: signed_again(json.dumps(manifest))}


def names(whole: Path, suffix: str) -> list[str]:
    return sorted(path.name for path in whole.iterdir() if path.name.endswith(suffix))


@FUZZ
@given(st.data())
def test_any_manifest_ends_in_a_bundle_error_or_serves(bundle: Path, data: st.DataObject) -> None:
    text = (bundle / MANIFEST).read_text()
    check(bundle, {MANIFEST: data.draw(damaged_json(text).map(signed_again) | damaged_bytes(text.encode()))})


@FUZZ
@given(st.data())
def test_any_plan_ends_in_a_bundle_error_or_serves(bundle: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(names(bundle, ".plan.json")))
    text = (bundle / name).read_text()
    changed = data.draw(damaged_json(text).map(str.encode) | damaged_bytes(text.encode()))
    check(bundle, with_listed(bundle, name, changed))


def test_an_image_that_the_driver_would_read_past_its_end_is_refused(bundle: Path) -> None:
    source, plan = tiny()[::-1]
    real = compile_source(source, plan=plan).image
    check_image(real)
    check_image(IMAGE)
    for length in {*range(0, len(real), 97), *range(len(real) - 64, len(real))}:
        with pytest.raises(BadFile):
            check_image(real[:length])
    changes = {0: b"\x7fELG", 4: b"\x01", 40: b"\xff" * 8, 56: b"\xff\xff", 58: b"\x3f\0",
               60: b"\xff\xff", 64 + 24: b"\x81", 64 + 32: b"\xff" * 8}  # by offset, of the header and of its section
    for at, data in changes.items():
        image = IMAGE[:at] + data + IMAGE[at + len(data):]
        with pytest.raises(BadFile):
            check_image(image)
        name = names(bundle, ".cubin")[0]
        with pytest.raises(BundleError, match=name):
            Bundle.load(damaged(bundle, with_listed(bundle, name, image))).get(Bundle.load(bundle).selectors()[0])


KINDS: dict[str, Callable[[Path], object]] = {
    "absent": lambda path: None, "a folder": lambda path: path.mkdir(), "a FIFO": lambda path: os.mkfifo(path),
    "a dangling link": lambda path: path.symlink_to("nowhere"), "a loop": lambda path: path.symlink_to(path),
    "a device": lambda path: path.symlink_to("/dev/zero")}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("suffix", [MANIFEST, ".plan.json", ".cubin"])
def test_what_is_no_file_is_told_and_never_waited_for(suffix: str, kind: str, bundle: Path, tmp_path: Path) -> None:
    folder = tmp_path / "b"
    shutil.copytree(bundle, folder)
    path = folder / names(bundle, suffix)[0]
    path.unlink()
    KINDS[kind](path)
    with pytest.raises(BundleError, match=path.name):
        serve(folder)


def test_a_file_that_goes_after_the_manifest_was_read_is_told(bundle: Path, tmp_path: Path) -> None:
    folder = tmp_path / "b"
    shutil.copytree(bundle, folder)
    loaded = Bundle.load(folder)
    selector = loaded.selectors()[0]
    shutil.rmtree(folder)
    with pytest.raises(BundleError, match=r"plan\.json cannot be read \(No such file"):
        loaded.get(selector)


@pytest.mark.parametrize(("path", "problem"), [
    ("empty", "manifest.json cannot be read (No such file or directory)"), ("absent", "No such file or directory"),
    ("file", "is a file"), ("file/b", "is a file"), ("x" * 300, "File name too long"),
    ("closed", "manifest.json cannot be read (Permission denied)")])
def test_the_search_path_names_what_is_no_bundle(
        path: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    real = os.open

    def opened(name: Any, *arguments: Any, **more: Any) -> int:
        if "closed" in os.fspath(name):  # permissions hold nobody who runs the tests as root
            raise PermissionError(13, "Permission denied", name)
        return real(name, *arguments, **more)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setenv("FLASHGEN_BUNDLE_PATH", f"{os.pathsep}{tmp_path / path}{os.pathsep}")
    registry = Registry()
    monkeypatch.setattr(lookup, "device_facts", lambda index: SimpleNamespace(cc=90))
    for _ in range(2):  # nothing of it is kept that would serve the next call
        with pytest.raises(BundleError) as caught:
            registry.kernel(WANTED[0], 0)
        assert problem in caught.value.what and "FLASHGEN_BUNDLE_PATH" in caught.value.where
        assert "take it off FLASHGEN_BUNDLE_PATH" in caught.value.next


def test_an_empty_search_path_names_no_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("", os.pathsep):
        monkeypatch.setenv("FLASHGEN_BUNDLE_PATH", path)
        assert Registry()._search_path() == []


def test_a_path_that_no_file_can_have_is_told() -> None:
    for path in ("a\0b", "a\ud800"):
        with pytest.raises(BundleError, match=r"manifest\.json is a name that no file can have") as caught:
            Registry().load_bundle(path)
        assert str(caught.value).replace("\n", "").isprintable()


# -- entries of the cache


class Compiler:
    """Stands in for NVRTC, and counts."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, source: object, *, plan: Plan) -> Cubin:
        self.calls += 1
        return CUBIN


@pytest.fixture(scope="module")
def entry(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """The folder of a whole entry, and its files."""
    with mock.patch.object(cache_module, "compile_source", Compiler()):
        path = Cache(tmp_path_factory.mktemp("cache") / "c").get_or_build(*tiny()).path
    assert path is not None
    return path, {name: (path / name).read_bytes() for name in (*FILES, META)}


def serves_or_rebuilds(entry: tuple[Path, dict[str, bytes]],
                       changes: Mapping[str, bytes | Callable[[Path], object]]) -> bool:
    """The damaged entry is listed; it is served, or dropped with one warning and built once. Whether it was built."""
    path, whole = entry
    compiler, folder = Compiler(), path.parent.parent
    shutil.rmtree(path)
    path.mkdir()
    for name, change in {**whole, **changes}.items():
        change(path / name) if callable(change) else (path / name).write_bytes(change)
    with mock.patch.object(cache_module, "compile_source", compiler), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert [item.path for item in Cache(folder).ls()] == [path]
        found = Cache(folder).get_or_build(*tiny())
        check_image(found.cubin.image)
        assert found.plan == tiny()[0]
        assert compiler.calls == len(said) <= 1 and all("is damaged" in str(row.message) for row in said)
        assert Cache(folder).get_or_build(*tiny()).hit and compiler.calls == len(said)
    return compiler.calls == 1


@FUZZ
@given(st.data())
def test_any_meta_is_served_or_rebuilt(entry: tuple[Path, dict[str, bytes]], data: st.DataObject) -> None:
    meta = entry[1][META]
    serves_or_rebuilds(entry, {META: data.draw(
        damaged_json(meta.decode()).map(signed_again) | damaged_bytes(meta))})


@FUZZ
@given(st.data())
def test_any_listed_file_is_served_or_rebuilt(entry: tuple[Path, dict[str, bytes]], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(FILES))
    changed, meta = data.draw(damaged_bytes(entry[1][name])), json.loads(entry[1][META])
    meta["files"][name] = facts(changed)
    serves_or_rebuilds(entry, {name: changed, META: signed_again(json.dumps(meta))})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [META, "kernel.cubin"])
def test_an_entry_with_what_is_no_file_is_rebuilt(name: str, kind: str, entry: tuple[Path, dict[str, bytes]]) -> None:
    assert serves_or_rebuilds(entry, {name: KINDS[kind]})


def test_a_whole_entry_is_served_and_a_deep_one_rebuilt(entry: tuple[Path, dict[str, bytes]]) -> None:
    assert not serves_or_rebuilds(entry, {}) and serves_or_rebuilds(entry, {META: b"[" * 200_000})


# -- the cases as they were found


@pytest.mark.parametrize(("place", "value", "message"), [
    (("kernels", 0, "variant"), "a\0", '`kernels[0].variant` is "a\\u0000"'),
    (("kernels", 0, "variant"), "\ud800", '`kernels[0].variant` is "\\ud800"'),
    (("kernels", 0, "variant"), "../../etc/x", '`kernels[0].variant` is "../../etc/x"'),
    (("kernels", 1, "files"), [], "`kernels[1].files` is a list"),
    (("kernels", 1, "files", "cubin", "bytes"), -1, "`kernels[1].files.cubin.bytes` is -1"),
    (("kernels", 0, "resources"), {"registers": 1}, "`kernels[0].resources` lacks `stack_bytes`"),
    (("kernels",), 5, "`kernels` is 5"), (("schema",), [3], "has schema [3], launch rules 6"),
    (("kind",), "a bundle", "is not a bundle's"), (("more",), 1, 'has "more"')])
def test_a_wrong_field_of_the_manifest_is_named(
        place: tuple[Any, ...], value: object, message: str, bundle: Path, tmp_path: Path) -> None:
    fields = json.loads((bundle / MANIFEST).read_text())
    parent = fields
    for key in place[:-1]:
        parent = parent[key]
    parent[place[-1]] = value
    (tmp_path / MANIFEST).write_bytes(signed_again(json.dumps(fields)))
    with pytest.raises(BundleError) as caught:
        Bundle.load(tmp_path)
    assert caught.value.what.startswith(MANIFEST) and message in caught.value.what and caught.value.allowed


@pytest.mark.parametrize(("text", "message"), [
    (b"[" * 100_000, "nested too deeply"), (b"no", "is not JSON"), (b'"\xff"', "is not UTF-8"), (b"[]", "is a list"),
    (b"{}", "lacks `variant`")])
def test_a_plan_that_is_none_is_told(text: bytes, message: str, bundle: Path, tmp_path: Path) -> None:
    folder = tmp_path / "b"
    shutil.copytree(bundle, folder)
    name = names(bundle, ".plan.json")[0]
    for file, data in with_listed(bundle, name, text).items():
        (folder / file).write_bytes(data)
    with pytest.raises(BundleError) as caught:
        serve(folder)
    assert name in caught.value.what and message in caught.value.what


@pytest.mark.parametrize(("changes", "message"), [
    ({"launch": {"smem_bytes": -1}}, "`launch.smem_bytes` is -1"),
    ({"launch": {"threads": 0}}, "`launch.threads` is 0"), ({"roles": [{}]}, "`roles[0]` lacks `name`"),
    ({"variant": "a\0b"}, '`variant` is "a\\u0000b"'), ({"target": "sm_90a/../x"}, "`target` is"),
    ({"allowed_spill_bytes": 2**31}, "`allowed_spill_bytes` is 2147483648"), ({"params": {}}, "`params` is an object")])
def test_a_plan_whose_launch_would_fail_is_refused_with_the_field(changes: dict[str, Any], message: str) -> None:
    raw = json.loads(_plans()[0].to_json())
    for name, value in changes.items():
        raw[name] = {**raw[name], **value} if name == "launch" else value
    with pytest.raises(PlanError) as caught:
        Plan.from_json(json.dumps(raw))
    assert message in caught.value.what and caught.value.allowed


def _unheard_of(plan: Plan) -> Plan:
    params = (replace(param, name="unheard_of") if param.name == "batch" else param for param in plan.params)
    return replace(plan, params=tuple(params))


@pytest.mark.parametrize(("change", "message"), [
    (_unheard_of, "no call can be packed for it .*unheard_of"),
    (lambda plan: replace(plan, launch=replace(plan.launch, smem_bytes=2**20)), "shared memory map ends at"),
    (lambda plan: replace(plan, params=(*plan.params, plan.params[0])), "comes twice"),
    (lambda plan: replace(plan, params=sorted(plan.params, key=lambda p: p.about)), "do not lie side by side"),
    (lambda plan: replace(plan, tensor_maps=plan.tensor_maps[1:]), "tensor maps .* describe")])
def test_a_plan_that_cannot_be_launched_is_refused_before_a_call(
        change: Callable[[Plan], Plan], message: str, tmp_path: Path) -> None:
    entry = Entry("0" * 64, CUBIN, change(_plans()[0]), "", None, False)
    with pytest.raises(BundleError, match=rf"plan\.json: .*{message}"):
        serve(write_bundle([entry], tmp_path / "b"))
