"""An Entry and its folder on disk: the format, written whole and verified on every load."""
from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from flashgen.codegen.plan import Plan
from flashgen.runtime.cubin import Cubin, Resources

SCHEMA = 1  # part of the cache key
META = "meta.json"
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
            "files": {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
                      for name, data in files.items()}}
    meta["digest"] = hashlib.sha256(canonical(meta)).hexdigest()  # meta.json cannot list itself
    files[META] = json.dumps(meta, sort_keys=True, indent=1).encode()
    return files


def read_entry(folder: Path, key: str, plan: Plan) -> Entry | None:
    """The entry in `folder`, None if there is none. Damaged says what is wrong with it."""
    try:
        if not trusted(os.stat(folder).st_uid):  # planted while the directory was open to others
            raise Damaged("it belongs to another user")
        meta = json.loads((folder / META).read_bytes())
        digest = meta.pop("digest")
        if digest != hashlib.sha256(canonical(meta)).hexdigest() or (meta["schema"], meta["key"]) != (SCHEMA, key):
            raise Damaged(f"{META} has a wrong checksum")
        data = {name: (folder / name).read_bytes() for name in FILES}
    except FileNotFoundError as err:
        if not os.path.lexists(folder):  # absent, or taken away while we read
            return None
        raise Damaged(f"{Path(err.filename).name} is missing") from err
    except OSError as err:
        raise Damaged(f"{err.strerror}") from err
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise Damaged(f"{META} is not readable") from err
    for name, content in data.items():
        expected = meta["files"][name]
        if (len(content), hashlib.sha256(content).hexdigest()) != (expected["bytes"], expected["sha256"]):
            raise Damaged(f"{name} has {len(content)} of {expected['bytes']} bytes or a wrong checksum")
    cubin = Cubin(data["kernel.cubin"], tuple(meta["options"]), meta["nvrtc"], data["log.txt"].decode(),
                  Resources.from_dict(meta["resources"]))
    return Entry(key, cubin, plan, data["kernel.cu"].decode(), folder, True)
