"""YAML text, or plain Python data, -> a tree that knows where each value was written. Knows nothing of specs.

PyYAML speaks YAML 1.1, whose readings of `on`, `010` or `1:30` surprise people. Scalars are therefore read here, and
what YAML 1.1 would silently turn into something else becomes a Trap, which no field accepts.
"""
from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from flashgen.codegen.spec.show import Trap
from flashgen.errors import SpecError
from flashgen.files import show_path

MAX_FILE_BYTES = 1 << 18
MAX_DEPTH = 8  # a spec needs 6; the limit keeps Python's stack out of a hostile file's reach
MAX_SCALAR = 1000  # digits of a number: Python refuses to convert far longer ones
_TAG = "tag:yaml.org,2002:"
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Node(NamedTuple):
    value: Any      # a scalar, a Trap, a list of Nodes, or a dict from key to Entry
    where: str
    note: str = ""  # what to add when the value is refused


class Entry(NamedTuple):
    where: str      # of the key
    node: Node


def read_yaml(path: Path) -> tuple[Node, list[SpecError]]:
    """The tree of a file and what is wrong with its mappings.

    Raises SpecError where there is no tree, and FileNotFoundError, since only the caller knows what else there is.
    """
    where = show_path(path)
    root = _compose(read_text(path), where)
    if root is None:
        raise SpecError("file is empty", where=f"{where}:1:1", allowed="a mapping of spec fields")
    reader = _YamlReader(where)
    return reader.node(root, 0), reader.problems


def read_text(path: Path) -> str:
    """The text of a YAML file that somebody wrote by hand. Raises SpecError where it cannot be read, is longer than
    MAX_FILE_BYTES, as a device is, or is not UTF-8; FileNotFoundError where there is none."""
    where = show_path(path)
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise SpecError(f"cannot read: {getattr(error, 'strerror', None) or error}", where=where,
                        allowed="a readable YAML file") from None
    if len(raw) > MAX_FILE_BYTES:
        raise SpecError("file too large for a spec", where=where, allowed=f"at most {MAX_FILE_BYTES} bytes")
    return _decode(raw, where)


def _decode(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = error.object[:error.start].decode("utf-8", "replace")  # `object` is raw without its byte-order mark
        raise SpecError(f"byte 0x{error.object[error.start]:02x} is not UTF-8", where=where + _position(before),
                        allowed="text in UTF-8") from None


def _position(before: str) -> str:
    """`:line:column` of what follows this text, both from 1."""
    return f":{before.count(chr(10)) + 1}:{len(before) - before.rfind(chr(10))}"


def _compose(text: str, where: str) -> yaml.Node | None:
    try:
        loader = _Loader(text)
        try:
            node: yaml.Node | None = loader.get_single_node()
            return node
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = "not YAML: " + " ".join(filter(None, (error.context, error.problem)))
        allowed = "valid YAML"
        if "another document" in what:
            what, allowed = "a second YAML document starts here", "one document in a file"
        elif mark is not None and "\t" in "".join(text.split("\n")[mark.line:mark.line + 1]):
            allowed = "spaces, not tabs, for indentation"
        position = f":{mark.line + 1}:{mark.column + 1}" if mark is not None else ""
        raise SpecError(what, where=where + position, allowed=allowed) from None
    except yaml.reader.ReaderError:  # its own position counts bytes or characters, depending on the loader
        bad = re.search(r"[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", text)
        position = _position(text[:bad.start()]) if bad else ""
        raise SpecError(f"not YAML: character {bad[0] if bad else ''!a}", where=where + position,
                        allowed="printable text") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # what PyYAML's own parser adds to the above
        raise SpecError(f"not YAML: {type(error).__name__} {error}", where=where, allowed="valid YAML") from None


class _YamlReader:
    """Converts PyYAML nodes. Shared nodes are converted once, so that aliases of aliases cost nothing."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.problems: list[SpecError] = []
        self._done: dict[int, Node] = {}

    def where(self, node: yaml.Node) -> str:
        return f"{self.path}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"

    def node(self, node: yaml.Node, depth: int) -> Node:
        if id(node) not in self._done:
            self._done[id(node)] = Node(Trap("a value that contains itself"), self.where(node))
            self._done[id(node)] = self._convert(node, depth)
        return self._done[id(node)]

    def _convert(self, node: yaml.Node, depth: int) -> Node:
        where = self.where(node)
        if depth > MAX_DEPTH:
            return Node(Trap("a value nested too deeply"), where)
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            return Node([self.node(item, depth + 1) for item in node.value], where)
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            return Node(self._mapping(node, depth), where)
        if isinstance(node, yaml.ScalarNode):
            value, note = _scalar(node)
            return Node(value, where, note)
        return Node(Trap(f"a value tagged {node.tag}"), where)

    def _mapping(self, node: yaml.MappingNode, depth: int) -> dict[str, Entry]:
        own: dict[str, Entry] = {}
        merged: dict[str, Entry] = {}
        seen: set[str] = set()
        for key, value in node.value:
            where = self.where(key)
            if not isinstance(key, yaml.ScalarNode):
                self.problems.append(SpecError("a key is a list or a mapping", where=where, allowed="a word"))
                continue
            if key.value in seen:
                self.problems.append(SpecError(f"key {key.value!a} is there twice", where=where,
                                               allowed="each key once"))
            seen.add(key.value)
            if key.tag == _TAG + "merge":
                merged = self._merge(value, depth) | merged
            else:
                own[key.value] = Entry(where, self.node(value, depth + 1))
        return merged | own

    def _merge(self, node: yaml.Node, depth: int) -> dict[str, Entry]:
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        result: dict[str, Entry] = {}
        for source in sources:
            value = self.node(source, depth + 1).value
            if not isinstance(value, dict):
                self.problems.append(SpecError("<< needs another mapping, or a list of them", where=self.where(source),
                                               allowed="an alias such as *base"))
                continue
            result = value | result  # the first of several sources wins, as YAML 1.1 has it
        return result


def _scalar(node: yaml.ScalarNode) -> tuple[object, str]:
    """(value, note) of a scalar; the value is a Trap where YAML 1.1 reads something else than people write."""
    kind, text, plain = node.tag.removeprefix(_TAG), node.value, not node.style
    if kind == "str":
        if re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?|0o[0-7]+", text):
            return text, ", which YAML 1.1 reads as text; write it in full" if plain else ", which is quoted text"
        return text, ", which is quoted text" if not plain and text in ("true", "false", "null") else ""
    if kind == "null":
        return None, "" if text else " (nothing is written)"
    value = None
    if kind in _AS_WRITTEN and len(text) <= MAX_SCALAR:
        with contextlib.suppress(ValueError, KeyError):  # what is tagged as a kind, and is not of it
            value = getattr(_YAML_1_1, f"construct_yaml_{kind}")(node)
    if value is None:
        return Trap(text, None), f", which YAML reads as {_KINDS.get(kind, f'a value tagged {node.tag}')}"
    if re.fullmatch(_AS_WRITTEN[kind], text):
        return value, ""
    shown = str(value).lower()
    return Trap(text, value), f", which YAML 1.1 reads as {shown}; write {shown}, or quote it if text is meant"


_KINDS = {"timestamp": "a date", "binary": "binary data", "merge": "a merge key", "value": "a default key",
          "int": "a number too long to use"}
_AS_WRITTEN = {"bool": r"true|false|True|False|TRUE|FALSE", "int": r"[-+]?(0|[1-9]\d*)", "float": r"[^:]*"}
_YAML_1_1 = yaml.constructor.SafeConstructor()


def from_python(value: object, where: str, depth: int = 0) -> Node:
    """The same tree from dicts, lists, tuples and scalars; `where` grows as `spec.tile.m` or `spec.arch[1]`."""
    if depth > MAX_DEPTH:
        return Node(Trap("a value nested too deeply"), where)
    if isinstance(value, Mapping):
        items = {key if type(key) is str else f"<{type(key).__name__}>": item for key, item in value.items()}
        return Node({key: Entry(f"{where}.{key}", from_python(item, f"{where}.{key}", depth + 1))
                     for key, item in items.items()}, where)
    if isinstance(value, (list, tuple)):
        return Node([from_python(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)], where)
    if value is None or type(value) in (bool, int, float, str):
        return Node(value, where)
    return Node(Trap(f"an object of type {type(value).__name__}"), where)
