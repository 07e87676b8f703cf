"""An Entry and its folder on disk: the format, written whole and verified on every load."""
from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from flashgen.codegen.plan import Plan
from flashgen.files import (
    MAX_FILE_BYTES,
    Arch,
    BadFile,
    Name,
    Sha256,
    between,
    build,
    parse_json,
    read_file,
    text_of,
    with_keys,
)
from flashgen.runtime.compile.cubin import Cubin, Resources, check_image

SCHEMA = 1  # part of the cache key
META = "meta.json"
MAX_META_BYTES = 1 << 20  # a few KiB are needed
FILES = ("kernel.cu", "kernel.cubin", "plan.json", "log.txt")


@dataclass(frozen=True)
class Entry:
    """A compiled kernel. `path` is its folder, None if it lives in memory only; `hit` says it was not compiled now."""

    key: str
    cubin: Cubin
    plan: Plan
    text: str
    path: Path | None
    hit: bool


@dataclass(frozen=True)
class FileFacts:
    """What a listed file must be."""

    bytes: Annotated[int, between(0, MAX_FILE_BYTES)]
    sha256: Sha256


@dataclass(frozen=True)
class Meta:
    """The content of meta.json."""

    schema: int
    key: Sha256
    variant: Name
    arch: Arch
    nvrtc: str
    options: tuple[str, ...]
    resources: Resources
    files: Annotated[dict[str, FileFacts], with_keys(FILES)]
    digest: Sha256


class Damaged(Exception):
    """An entry exists but is not what was published."""


def trusted(uid: int) -> bool:
    """Whether kernels of this owner may run here: one's own, and root's, who needs no cache to attack."""
    return uid in (os.geteuid(), 0)


def canonical(value: object) -> bytes:
    """One JSON spelling per value, for hashing."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def entry_files(entry: Entry) -> dict[str, bytes]:
    """The files of an entry, meta.json last."""
    cubin = entry.cubin
    contents = (entry.text.encode(), cubin.image, entry.plan.to_json().encode(), cubin.log.encode())
    files = dict(zip(FILES, contents, strict=True))
    meta = {"schema": SCHEMA, "key": entry.key, "variant": entry.plan.variant, "arch": entry.plan.target,
            "nvrtc": cubin.nvrtc, "options": cubin.options, "resources": cubin.resources.to_dict(),
            "files": {name: facts(data) for name, data in files.items()}}
    files[META] = json.dumps(signed(meta), sort_keys=True, indent=1).encode()
    return files


def facts(data: bytes) -> dict[str, Any]:
    """FileFacts of a content, for a list of files."""
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def signed(fields: dict[str, Any]) -> dict[str, Any]:
    """`fields` with their own digest: a list of files cannot list itself."""
    return {**fields, "digest": hashlib.sha256(canonical(fields)).hexdigest()}


def read_signed(path: Path, max_bytes: int) -> dict[str, Any]:
    """The fields of a JSON file whose digest is right, unchecked beyond that. Raises OSError and BadFile."""
    fields = parse_json(read_file(path, max_bytes))
    if not isinstance(fields, dict):
        raise BadFile("holds no object", allowed="an object")
    if fields != signed({name: value for name, value in fields.items() if name != "digest"}):
        raise BadFile("has a wrong checksum")
    return fields


def read_listed(path: Path, expected: FileFacts) -> bytes:
    """The content of a listed file. Raises OSError, and BadFile if it is another content than was listed."""
    data = read_file(path)
    if facts(data) != vars(expected):
        raise BadFile(f"has {len(data)} of {expected.bytes} bytes or a wrong checksum")
    return data


def read_meta(folder: Path) -> Meta:
    """What an entry says of itself. Raises OSError and BadFile."""
    meta: Meta = build(read_signed(folder / META, MAX_META_BYTES), Meta)
    return meta


def read_entry(folder: Path, key: str, plan: Plan) -> Entry | None:
    """The entry in `folder`, None if there is none. Damaged says what is wrong with it."""
    name = META
    try:
        if not trusted(os.stat(folder).st_uid):  # planted while the directory was open to others
            raise Damaged("it belongs to another user")
        meta = read_meta(folder)
        if (meta.schema, meta.key) != (SCHEMA, key):
            raise Damaged(f"{META} is that of another entry")
        data = {}
        for name in FILES:
            data[name] = read_listed(folder / name, meta.files[name])
        if plan.compiles_here:
            check_image(data["kernel.cubin"])
        elif data["kernel.cubin"] != data["kernel.cu"]:
            raise BadFile("is not the kernel's text")
        text, log = (text_of(data[name]) for name in ("kernel.cu", "log.txt"))
    except FileNotFoundError as err:
        if not os.path.lexists(folder):  # absent, or taken away while we read
            return None
        raise Damaged(f"{Path(err.filename).name} is missing") from err
    except OSError as err:
        raise Damaged(f"{name}: {err.strerror}") from err
    except BadFile as err:
        raise Damaged(err.of(name)) from err
    return Entry(key, Cubin(data["kernel.cubin"], meta.options, meta.nvrtc, log, meta.resources), plan, text, folder,
                 True)
