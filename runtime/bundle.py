"""A bundle: a folder of compiled kernels with a manifest, served without NVRTC, Jinja or pyelftools.

    <variant>.<arch>.cubin  .cu  .plan.json     for each kernel
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
from pathlib import Path
from typing import Any

from flashgen.codegen.plan import CTYPES, Plan, params_layout
from flashgen.errors import BundleError
from flashgen.runtime.cubin import Resources
from flashgen.runtime.entry import Entry, canonical
from flashgen.runtime.selector import Selector, selector_of

SCHEMA = 3        # of the manifest
LAUNCH_RULES = 5  # raise it when runtime/values.py derives grid, block or argument values from a plan differently
MANIFEST = "manifest.json"
_KIND = "flashgen bundle"
_STAGING_PREFIX = ".flashgen-bundle-"
_SUFFIXES = ("cubin", "cu", "plan.json")


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
        rows = [_write_kernel(entry, staging) for entry in _one_per_selector(entries)]
        manifest: dict[str, Any] = {"kind": _KIND, "schema": SCHEMA, "launch_rules": LAUNCH_RULES, "kernels": rows}
        manifest["digest"] = hashlib.sha256(canonical(manifest)).hexdigest()
        (staging / MANIFEST).write_text(json.dumps(manifest, sort_keys=True, indent=1) + "\n")
        staging.chmod(0o777 & ~_umask())  # mkdtemp makes it private; a bundle is meant to be shared
        _replace(staging, out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)  # gone already if it was renamed
    return out


class Bundle:
    """The kernels of one folder by selector. Cubins are read, and verified, when they are first asked for."""

    def __init__(self, path: Path, rows: dict[Selector, dict[str, Any]]) -> None:
        self.path, self._rows = path, rows
        self._loaded: dict[Selector, tuple[Plan, bytes]] = {}

    @classmethod
    def load(cls, path: Path | str) -> Bundle:
        """BundleError if the manifest is absent, damaged, or of a flashgen that packs launches differently."""
        path = Path(path).absolute()
        manifest = _read_manifest(path)
        if (manifest["schema"], manifest["launch_rules"]) != (SCHEMA, LAUNCH_RULES):
            raise _error(path, f"schema {manifest['schema']}, launch rules {manifest['launch_rules']}",
                         allowed=f"schema {SCHEMA}, launch rules {LAUNCH_RULES}: another flashgen wrote it")
        try:
            return cls(path, {Selector(**row["selector"]): row for row in manifest["kernels"]})
        except (KeyError, TypeError) as err:
            raise _error(path, f"{MANIFEST} lacks {err}") from err

    def selectors(self) -> tuple[Selector, ...]:
        return tuple(self._rows)

    def resources(self, selector: Selector) -> Resources:
        return Resources.from_dict(self._rows[selector]["resources"])

    def get(self, selector: Selector) -> tuple[Plan, bytes] | None:
        """(plan, cubin image), None if the bundle has no such kernel. BundleError if its files are damaged."""
        row = self._rows.get(selector)
        if row is None:
            return None
        if selector not in self._loaded:
            text = self._file(row, "plan.json").decode()
            try:
                plan = Plan.from_json(text)
                same_abi = abi_digest(plan) == row["abi"]
            except (KeyError, TypeError) as err:
                raise _error(self.path, f"{row['variant']}.{row['arch']}.plan.json is of another flashgen") from err
            if not same_abi:
                raise _error(self.path, f"{plan.kernel_name} packs its parameters differently here",
                             allowed="the ABI digest of the flashgen that wrote it")
            self._loaded[selector] = plan, self._file(row, "cubin")
        return self._loaded[selector]

    def _file(self, row: dict[str, Any], suffix: str) -> bytes:
        name, expected = f"{row['variant']}.{row['arch']}.{suffix}", row["files"][suffix]
        try:
            data = (self.path / name).read_bytes()
        except OSError as err:
            raise _error(self.path, f"{name} cannot be read ({err.strerror})") from err
        if (len(data), hashlib.sha256(data).hexdigest()) != (expected["bytes"], expected["sha256"]):
            raise _error(self.path, f"{name} has {len(data)} of {expected['bytes']} bytes or a wrong checksum")
        return data


def _error(path: Path, what: str, allowed: str = "") -> BundleError:
    return BundleError(what, where=str(path), allowed=allowed, next=f"flashgen bundle SPEC... -o {path} writes it anew")


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        digest = manifest.pop("digest")
        if manifest["kind"] != _KIND or digest != hashlib.sha256(canonical(manifest)).hexdigest():
            raise _error(path, f"{MANIFEST} has a wrong checksum")
    except OSError as err:
        raise _error(path, f"{MANIFEST} cannot be read ({err.strerror})") from err
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise _error(path, f"{MANIFEST} is damaged") from err
    return manifest


def _one_per_selector(entries: Iterable[Entry]) -> list[Entry]:
    chosen: dict[Selector, Entry] = {}
    for entry in entries:
        other = chosen.setdefault(selector_of(entry.plan), entry)
        if other.key != entry.key:
            raise BundleError(f"{other.plan.kernel_name} and {entry.plan.kernel_name} serve the same calls",
                              where=entry.plan.kernel_name, allowed="one kernel per selector in a bundle",
                              next="bundle one of them, or each in a folder of its own")
    return list(chosen.values())


def _write_kernel(entry: Entry, folder: Path) -> dict[str, Any]:
    """Write the kernel's files; its row in the manifest."""
    plan, cubin, files = entry.plan, entry.cubin, {}
    for suffix, data in zip(_SUFFIXES, (cubin.image, entry.text.encode(), plan.to_json().encode()), strict=True):
        (folder / f"{plan.kernel_name}.{suffix}").write_bytes(data)
        files[suffix] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    return {"variant": plan.variant, "arch": plan.target, "selector": selector_of(plan)._asdict(), "key": entry.key,
            "abi": abi_digest(plan), "nvrtc": cubin.nvrtc, "options": cubin.options,
            "resources": cubin.resources.to_dict(), "files": files}


def _check_replaceable(out: Path) -> None:
    """BundleError unless `out` is absent, an empty folder, or a bundle and nothing but a bundle."""
    trouble = ""
    if out.is_dir():
        names = {path.name for path in out.iterdir()}
        try:
            rows = _read_manifest(out)["kernels"] if names else []
            known = {MANIFEST, *(f"{row['variant']}.{row['arch']}.{suffix}" for row in rows for suffix in _SUFFIXES)}
            if names - known:
                trouble = f"holds files that are not the bundle's: {', '.join(sorted(names - known))}"
        except (BundleError, KeyError, TypeError):
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
