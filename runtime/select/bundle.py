"""A bundle: a folder of compiled kernels with a manifest, served without NVRTC, Jinja or pyelftools.

    <variant>.<arch>.cubin  .cu  .plan.json     for each kernel; of Triton .py and .plan.json
    manifest.json                               schema, and per kernel its selector, ABI digest, resources, checksums

The checksums find damage; they do not prove who made a bundle. Whoever puts a folder on FLASHGEN_BUNDLE_PATH
trusts its maker.
"""
from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from flashgen.codegen.plan import CTYPES, Plan, params_layout, verify
from flashgen.codegen.target import TARGETS
from flashgen.errors import BundleError, PlanError
from flashgen.files import Arch, BadFile, Name, Sha256, build, show_path, with_keys
from flashgen.runtime.compile.cubin import Resources, check_image
from flashgen.runtime.compile.entry import Entry, FileFacts, canonical, facts, read_listed, read_signed, signed
from flashgen.runtime.launch.rehearsal import check_launch
from flashgen.runtime.select.selector import Selector, selector_of

if TYPE_CHECKING:
    from flashgen.runtime.compile.build import Rendered

SCHEMA = 5        # of the manifest
LAUNCH_RULES = 6  # raise it when families/*/launch.py derives grid, block or argument values from a plan differently
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 16 << 20  # a kernel takes about 2 KiB of it
_KIND = "flashgen bundle"
_STAGING_PREFIX = ".flashgen-bundle-"
_SUFFIXES = {"cu": ("cubin", "cu", "plan.json"), "py": ("py", "py", "plan.json")}  # of image, text and plan


@dataclass(frozen=True)
class Row:
    """What the manifest says of a kernel."""

    variant: Name
    arch: Arch
    selector: Selector
    key: Sha256
    abi: Sha256
    nvrtc: str
    options: tuple[str, ...]
    resources: Resources
    files: Annotated[dict[str, FileFacts], with_keys(*_SUFFIXES.values())]

    @property
    def image(self) -> str:
        """The suffix of what is loaded."""
        return "cubin" if "cubin" in self.files else "py"

    def file(self, suffix: str) -> str:
        return f"{self.variant}.{self.arch}.{suffix}"


@dataclass(frozen=True)
class Manifest:
    kind: str
    schema: int
    launch_rules: int
    kernels: tuple[Row, ...]
    digest: Sha256


def abi_digest(plan: Plan) -> str:
    """Hash of how a launch of `plan` is packed: members, their types and offsets, and the launch rules."""
    layout = [[param.name, param.ctype, CTYPES[param.ctype].cuda] for param in plan.params]
    return hashlib.sha256(canonical([LAUNCH_RULES, layout, params_layout(plan.params)])).hexdigest()


def write_bundle(entries: Iterable[Entry], out_dir: Path | str) -> Path:
    """Write `entries` as a bundle; returns its folder.

    It is made beside its place and renamed there. An older bundle at `out_dir` is replaced, an empty folder filled;
    BundleError if anything else is there, or if two entries answer to the same selector.
    """
    out = Path(out_dir).resolve()
    _check_replaceable(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=_STAGING_PREFIX, dir=out.parent))
    try:
        kernels = one_per_selector(entries)
        for entry in kernels:
            for suffix, data in kernel_files(entry).items():
                (staging / f"{entry.plan.kernel_name}.{suffix}").write_bytes(data)
        (staging / MANIFEST).write_bytes(manifest_bytes(map(row_of, kernels)))
        staging.chmod(0o777 & ~_umask())  # mkdtemp makes it private; a bundle is meant to be shared
        _replace(staging, out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)  # gone already if it was renamed
    return out


class Bundle:
    """The kernels of one folder by selector. Cubins are read, and verified, when they are first asked for."""

    def __init__(self, path: Path, rows: dict[Selector, Row]) -> None:
        self.path, self._rows = path, rows
        self._loaded: dict[Selector, tuple[Plan, bytes]] = {}

    @classmethod
    def load(cls, path: Path | str) -> Bundle:
        """BundleError if the manifest is absent, damaged, or of a flashgen that packs launches differently."""
        if not isinstance(path, (str, os.PathLike)):
            raise BundleError(f"the directory of a bundle is of type {type(path).__name__}", where="directory",
                              allowed="a path", next="flashgen bundle SPEC... -o DIR writes one")
        path = Path(path).absolute()
        try:
            fields = _read_manifest(path)
            made_by = fields.get("schema"), fields.get("launch_rules")
            if made_by != (SCHEMA, LAUNCH_RULES):
                raise BadFile(f"has schema {made_by[0]!s:.40}, launch rules {made_by[1]!s:.40}",
                              allowed=f"schema {SCHEMA}, launch rules {LAUNCH_RULES}: another flashgen wrote it")
            rows: dict[Selector, Row] = {}
            for number, row in enumerate(build(fields, Manifest).kernels):
                if rows.setdefault(row.selector, row) is not row:
                    raise BadFile(f"serves the same calls as {rows[row.selector].variant}", place=f"kernels[{number}]",
                                  allowed="one kernel per selector in a bundle")
        except BadFile as err:
            raise _error(path, err.of(MANIFEST), err.allowed) from err
        return cls(path, rows)

    def selectors(self) -> tuple[Selector, ...]:
        return tuple(self._rows)

    def resources(self, selector: Selector) -> Resources:
        return self._rows[selector].resources

    def get(self, selector: Selector) -> tuple[Plan, bytes] | None:
        """(plan, image), None if the bundle has no such kernel. BundleError if its files are damaged."""
        row = self._rows.get(selector)
        if row is None:
            return None
        if selector not in self._loaded:
            self._loaded[selector] = self._plan(row), self._file(row, row.image)
        return self._loaded[selector]

    def _plan(self, row: Row) -> Plan:
        """The row's plan, which is what the row says and can be launched."""
        name, text = row.file("plan.json"), self._file(row, "plan.json")
        try:
            plan = Plan.from_json(text)
            served = selector_of(plan)
            if (plan.variant, plan.target, served) != (row.variant, row.arch, row.selector):
                raise BadFile(f"is the plan of {plan.kernel_name}, which serves {served}",
                              allowed=f"{row.variant}.{row.arch}, which serves {row.selector}")
            if row.image != _SUFFIXES[plan.language][0]:
                raise BadFile(f"is the plan of a text of .{plan.language}", allowed=f"of a kernel with .{row.image}")
            if plan.target not in TARGETS:
                raise BadFile(f"is for {plan.target}", allowed=", ".join(TARGETS))
            verify(plan, TARGETS[plan.target])
            check_launch(plan)
            if abi_digest(plan) != row.abi:
                raise BadFile("packs its parameters differently here",
                              allowed="the ABI digest of the flashgen that wrote it")
        except BadFile as err:
            raise _error(self.path, err.of(name), err.allowed) from err
        except PlanError as err:
            raise _error(self.path, f"{name}: {err.what}", err.allowed) from err
        except KeyError as err:
            raise _error(self.path, f"{name}: `spec` lacks {err}", "the fields that a selector has") from err
        return plan

    def _file(self, row: Row, suffix: str) -> bytes:
        name = row.file(suffix)
        try:
            data = read_listed(self.path / name, row.files[suffix])
            if suffix == "cubin":
                check_image(data)
            return data
        except OSError as err:
            raise _error(self.path, f"{name} cannot be read ({err.strerror})") from err
        except BadFile as err:
            raise _error(self.path, err.of(name), err.allowed) from err


def _error(path: Path, what: str, allowed: str = "") -> BundleError:
    where = show_path(path)
    return BundleError(what, where=where, allowed=allowed, next=f"flashgen bundle SPEC... -o {where} writes it anew")


def _read_manifest(path: Path) -> dict[str, Any]:
    """The manifest's fields, which nobody has changed, unchecked beyond that. Raises BadFile, and BundleError where
    there is none."""
    try:
        fields = read_signed(path / MANIFEST, MAX_MANIFEST_BYTES)
    except NotADirectoryError as err:
        raise _error(path, "is a file", allowed=f"a folder with {MANIFEST}") from err
    except OSError as err:
        raise _error(path, f"{MANIFEST} cannot be read ({err.strerror})",
                     allowed=f"a folder with {MANIFEST}") from err
    if fields.get("kind") != _KIND:
        raise BadFile("is not a bundle's", allowed=f"kind: {_KIND}")
    return fields


_Keyed = TypeVar("_Keyed", "Rendered", Entry)  # what is bundled, compiled or not yet


def one_per_selector(kernels: Iterable[_Keyed]) -> list[_Keyed]:
    """The kernels, each once. BundleError if two of them answer to the same selector."""
    chosen: dict[Selector, _Keyed] = {}
    for entry in kernels:
        other = chosen.setdefault(selector_of(entry.plan), entry)
        if other.key != entry.key:
            raise BundleError(f"{other.plan.kernel_name} and {entry.plan.kernel_name} serve the same calls",
                              where=entry.plan.kernel_name, allowed="one kernel per selector in a bundle",
                              next="bundle one of them, or each in a folder of its own")
    return list(chosen.values())


def kernel_files(entry: Entry) -> dict[str, bytes]:
    """The contents of a kernel's files, by suffix."""
    contents = entry.cubin.image, entry.text.encode(), entry.plan.to_json().encode()
    return dict(zip(_SUFFIXES[entry.plan.language], contents, strict=True))


def row_of(entry: Entry) -> dict[str, Any]:
    """The kernel's row in the manifest, as JSON has it."""
    plan, cubin = entry.plan, entry.cubin
    return {"variant": plan.variant, "arch": plan.target, "selector": selector_of(plan)._asdict(), "key": entry.key,
            "abi": abi_digest(plan), "nvrtc": cubin.nvrtc, "options": cubin.options,
            "resources": cubin.resources.to_dict(),
            "files": {suffix: facts(data) for suffix, data in kernel_files(entry).items()}}


def manifest_bytes(rows: Iterable[dict[str, Any]]) -> bytes:
    """The content of the manifest with these rows."""
    manifest = {"kind": _KIND, "schema": SCHEMA, "launch_rules": LAUNCH_RULES, "kernels": list(rows)}
    return json.dumps(signed(manifest), sort_keys=True, indent=1).encode() + b"\n"


def _check_replaceable(out: Path) -> None:
    """BundleError unless `out` is absent, an empty folder, or a bundle and nothing but a bundle."""
    trouble = ""
    if out.is_dir():
        names = {path.name for path in out.iterdir()}
        try:
            rows = _read_manifest(out)["kernels"] if names else []
            known = {MANIFEST, *(f"{row['variant']}.{row['arch']}.{suffix}" for row in rows for suffix in row["files"])}
            if names - known:
                trouble = f"holds files that are not the bundle's: {', '.join(sorted(names - known))}"
        except (BundleError, BadFile, KeyError, TypeError):
            trouble = "is not a bundle"
    elif os.path.lexists(out):
        trouble = "is not a folder"
    if trouble:
        raise BundleError(trouble, where=str(out), allowed="a new folder, an empty one, or an older bundle",
                          next="choose another -o DIR")


def _replace(staging: Path, out: Path) -> None:
    """Rename `staging` to `out`; what was there is put back if that fails."""
    if not out.exists():
        os.rename(staging, out)
        return
    old = Path(tempfile.mkdtemp(prefix=_STAGING_PREFIX, dir=out.parent))
    try:
        os.rename(out, old)
        try:
            os.rename(staging, out)
        except OSError:
            os.rename(old, out)
            raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
