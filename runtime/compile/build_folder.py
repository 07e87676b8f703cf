"""A build folder: a bundle together with the ninja file that makes it anew. `flashgen build SPEC... -o DIR` writes it.

    <kernel>.cu  .plan.json        what the specs and templates give; .flashgen/<kernel>.key is the kernel's cache key
    <kernel>.cubin                 the compiled kernel; .flashgen/<kernel>.row.json is its row of the manifest
    manifest.json                  makes the folder a bundle
    build.ninja, kernels.ninja     what `ninja -C DIR` reads, and what another project's ninja file may name

A key holds all that NVRTC sees, so headers and compilers need no edges of their own: sources are rendered again, and a
key that stays as it was leaves its cubin as it was. Each edge leaves alone the files whose content would not change
(`restat`). What ninja runs is `flashgen build --sources-only` for the sources, and this module for the rest. It
compiles through the cache, as every other call does.
"""
from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import json
import math
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import flashgen
from flashgen.codegen.plan import Plan
from flashgen.errors import BundleError, CompileError, EnvironmentError_, FlashgenError, of_os
from flashgen.files import BadFile, build, parse_json, read_file, text_of
from flashgen.runtime.compile.build import Rendered, jobs_default
from flashgen.runtime.compile.cache import Cache
from flashgen.runtime.compile.entry import Entry
from flashgen.runtime.select.bundle import MANIFEST, Row, kernel_files, manifest_bytes, one_per_selector, row_of

MODULE = "flashgen.runtime.compile.build_folder"  # as Python's -m takes it
HIDDEN = ".flashgen"
ENTRANCE, EDGES = "build.ninja", "kernels.ninja"
BATCH = 8              # kernels of an edge at most: a worker's start is then 5 % of its work or less
LINE_WIDTH = 118
UNSPEAKABLE = "$|\r\n"  # ninja has no spelling for some of these in a path, and ninja_syntax none for the others


class BuildFolder:
    """One such folder. What it writes is renamed into place, so a process that dies leaves no half of a file."""

    def __init__(self, path: Path | str) -> None:
        """`path` need not exist. Nothing is written yet. BundleError if it cannot become a build folder."""
        self.path = Path(path).resolve()
        self._hidden, self._languages = self.path / HIDDEN, dict[str, str]()
        _check_name(str(self.path))
        taken = self.path.exists() and not self._hidden.is_dir()
        if taken and (not self.path.is_dir() or any(self.path.iterdir())):
            raise BundleError("is no build folder", where=str(self.path),
                              allowed="a new folder, an empty one, or one that flashgen build -o wrote",
                              next="choose another -o DIR, or remove this one")

    def write_sources(self, kernels: Iterable[Rendered], specs: Sequence[Path], options: Sequence[str],
                      jobs: int | None = None, since_ns: int | None = None) -> None:
        """Write texts, plans, keys and ninja files; remove the files of kernels that are not among these.

        `specs` and `options` are what `flashgen build` was asked. `since_ns` is the time before anything was read: the
        sources get it as theirs, so that ninja sees what changed in between. BundleError if two kernels serve the same
        calls, or if ninja cannot spell a name.
        """
        kernels = one_per_selector(kernels)
        self._languages = {kernel.plan.kernel_name: kernel.plan.language for kernel in kernels}
        names = sorted(self._languages)
        edges = _edges(self, names, [path.resolve() for path in specs], options, jobs)
        self._hidden.mkdir(parents=True, exist_ok=True)  # first: it says whose folder this is
        since_ns = time.time_ns() if since_ns is None else since_ns
        contents = {path: text for kernel in kernels for path, text in zip(
            self.sources(kernel.plan.kernel_name), (kernel.text, kernel.plan.to_json(), kernel.key), strict=True)}
        gone = [path for name in set(self.kernels()) - set(names)
                for path in (*self.sources(name), *self.products(name))]
        if gone or not all(map(_holds, contents, map(str.encode, contents.values()))):
            gone.append(self.path / MANIFEST)  # only whole folders have it: load_bundle then says so at once
        for path in gone:
            path.unlink(missing_ok=True)
        for path, text in contents.items():
            self._write(path, text.encode(), since_ns)
        self._write(self.path / EDGES, edges, since_ns)
        self._write(self.path / ENTRANCE, _entrance(self.path), since_ns)

    def kernels(self) -> list[str]:
        """The names of the kernels whose sources are here."""
        return sorted(path.name.removesuffix(".key") for path in self._hidden.glob("*.key"))

    def put(self, entry: Entry) -> None:
        """Write a compiled kernel: its cubin, and its row of the manifest."""
        *cubins, row = self.products(entry.plan.kernel_name)
        for cubin in cubins:
            self._write(cubin, kernel_files(entry)["cubin"])
        self._write(row, json.dumps(row_of(entry), sort_keys=True).encode())

    def compile(self, name: str, cache: Cache) -> None:
        """Compile a kernel from its text and plan in this folder, through the cache. Raises what that raises."""
        from flashgen.codegen.render import source_of

        text, plan, _ = self.sources(name)
        try:
            contents = text_of(read_file(text)), read_file(plan)
        except FileNotFoundError as err:
            raise CompileError("its sources are gone", where=name, allowed="a kernel that the specs still have",
                               next="ninja again: the list of kernels is read when it starts") from err
        except BadFile as err:
            raise CompileError(err.of("a source"), where=name, allowed=err.allowed) from err
        made = Plan.from_json(contents[1])
        self.put(cache.build(made, source_of(made, contents[0])))

    def write_manifest(self) -> Path:
        """Make the folder a bundle: all its kernels are compiled. BundleError if a row is missing or damaged."""
        rows = []
        for name in self.kernels():
            path = self.products(name)[-1]
            try:
                rows.append(parse_json(read_file(path)))
                build(rows[-1], Row)
            except (OSError, BadFile) as err:
                what = err.of(path.name) if isinstance(err, BadFile) else f"{path.name}: {err.strerror}"
                raise BundleError(what, where=str(self.path), next=f"ninja -C {self.path}") from err
        self._write(self.path / MANIFEST, manifest_bytes(rows))
        return self.path

    def sources(self, name: str) -> tuple[Path, Path, Path]:
        """The files of a kernel's text, plan and key."""
        text = self.path / f"{name}.{self._language(name)}"
        return text, self.path / f"{name}.plan.json", self._hidden / f"{name}.key"

    def products(self, name: str) -> tuple[Path, ...]:
        """The files of a kernel's cubin, where it has one, and of its row in the manifest."""
        cubins = (self.path / f"{name}.cubin",) if self._language(name) == "cu" else ()
        return *cubins, self._hidden / f"{name}.row.json"

    def _language(self, name: str) -> str:
        """Of a kernel's text: of the kernels that are being written, else of those that are here."""
        return self._languages.get(name) or ("py" if (self.path / f"{name}.py").exists() else "cu")

    def _write(self, path: Path, data: bytes, time_ns: int | None = None) -> None:
        if _holds(path, data):
            return
        part = self._hidden / f".{path.name}.{os.getpid()}"
        try:
            part.write_bytes(data)
            if time_ns is not None:
                os.utime(part, ns=(time_ns, time_ns))
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)


def _holds(path: Path, data: bytes) -> bool:
    with contextlib.suppress(OSError):
        return path.read_bytes() == data
    return False


# -- the ninja files


def _entrance(folder: Path) -> bytes:
    """build.ninja. Its own edge is how ninja learns, before it starts, that kernels.ninja may have to change."""
    out = _writer()
    out.comment(f"Written by flashgen build. `ninja -C {folder}` makes these kernels anew where anything that they "
                f"come from has changed; docs/build.md tells how another project includes them.")
    out.subninja(_path(folder / EDGES))
    out.build(ENTRANCE, "phony", str(folder / EDGES))
    return _text(out)


def _edges(here: BuildFolder, names: list[str], specs: Sequence[Path], options: Sequence[str],
           jobs: int | None) -> bytes:
    """kernels.ninja: all paths are absolute and all names are this folder's own, so it can be read from anywhere."""
    folder, own = here.path, hashlib.sha256(os.fsencode(here.path)).hexdigest()[:8]
    out = _writer()
    out.comment("Written by flashgen build; flashgen build writes it again whenever specs, templates or code change.")
    out.pool(f"flashgen_{own}", jobs or jobs_default())
    asked = [*map(str, specs), *options, *(["--jobs", str(jobs)] if jobs else []), "-o", ".", "--sources-only"]
    commands = {"sources": (["flashgen", "build", *asked], ""), "compile": ([MODULE], " $kernels"),
                "bundle": ([MODULE], "")}
    for rule, (arguments, rest) in commands.items():
        # In the folder no name of another project hides flashgen. `generator` spares the log that a first run lacks.
        command = f"cd {shlex.quote(str(folder))} && {shlex.join([sys.executable, '-m', *arguments])}"
        _check_name(command, "\r\n")
        out.rule(f"{rule}_{own}", command.replace("$", "$$") + rest, f"flashgen $what in {_path(folder)}",
                 generator=True, restat=True, pool=f"flashgen_{own}")
    sources = [path for name in names for path in here.sources(name)]
    out.build(str(folder / EDGES), f"sources_{own}", implicit=_paths([*specs, *_origins()]),
              implicit_outputs=_paths(sources), variables={"what": f"sources of {len(names)} kernels"})
    for batch in _batches(names, jobs):
        made = [here.products(name) for name in batch]
        what = f"compile {batch[0]}" + (f" and {len(batch) - 1} more" if len(batch) > 1 else "")
        out.build(_paths(paths[0] for paths in made), f"compile_{own}",
                  _paths(path for name in batch for path in here.sources(name)),
                  implicit_outputs=_paths(path for paths in made for path in paths[1:]),
                  variables={"kernels": " ".join(batch), "what": what})
    products = [path for name in names for path in here.products(name)]
    out.build(str(folder / MANIFEST), f"bundle_{own}", _paths(products), variables={"what": MANIFEST})
    return _text(out)


def _batches(names: list[str], jobs: int | None) -> list[list[str]]:
    """Who is compiled by one worker: few starts, but work for every processor."""
    count = max(math.ceil(len(names) / BATCH), min(len(names), jobs or len(os.sched_getaffinity(0))))
    return [names[first::count] for first in range(count)]


def _origins() -> list[Path]:
    """What decides the text and the key of a kernel beside its spec: code, templates, and the compiler."""
    from flashgen.runtime.compile.nvrtc import library_path

    package = Path(flashgen.__file__).resolve().parent
    code = [path.resolve() for folder in ("codegen", "templates", "runtime/compile")
            for path in (package / folder).resolve().rglob("*") if path.suffix in (".py", ".j2", ".cuh")]
    rest = [(package / name).resolve() for name in ("errors.py", "files.py", "runtime/select/bundle.py")]
    library = library_path()
    return sorted({*code, *rest, *([library] if library else [])})


def _writer() -> Any:
    return _syntax().Writer(io.StringIO(), LINE_WIDTH)


def _syntax() -> Any:
    try:
        return importlib.import_module("ninja.ninja_syntax")  # only who writes ninja files pays for it
    except ImportError as err:
        raise EnvironmentError_(f"ninja cannot be imported: {err}", next='pip install "ninja>=1.11"') from err


def _text(writer: Any) -> bytes:
    return os.fsencode(writer.output.getvalue())


def _path(path: Path) -> str:
    return str(_syntax().escape_path(*_paths([path])))


def _paths(paths: Iterable[Path]) -> list[str]:
    """Paths for Writer.build, which escapes blanks and colons itself."""
    found = [str(path) for path in paths]
    for path in found:
        _check_name(path)
    return found


def _check_name(name: str, refused: str = UNSPEAKABLE) -> None:
    if any(letter in refused for letter in name):
        raise BundleError("ninja cannot spell this name", where=ascii(name), next="choose another -o DIR",
                          allowed="names without $, |, and line breaks")


# -- what ninja runs


def main(arguments: Sequence[str]) -> int:
    """In a build folder: compile the named kernels, or write the manifest if none is named. The exit code is that of
    the first error, and each error is told on standard error; one kernel's does not stop the others."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ninja sends it, and nobody wants a traceback for it
    folder, cache, code = BuildFolder("."), Cache(), 0
    for name in arguments or [""]:
        try:
            if name:
                folder.compile(name, cache)
            else:
                folder.write_manifest()
        except (FlashgenError, OSError) as err:
            told = of_os(err) if isinstance(err, OSError) else err
            print(f"error: {told}", file=sys.stderr)
            code = code or told.exit_code
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
