"""Files that somebody else may have damaged or forged: they are read whole and checked, or refused with a reason.

Reading has three steps. `read_file` gives the bytes of a regular file of a bounded size. `parse_json` accepts only JSON
that means one thing: no duplicate keys, no NaN, no deep nesting. `build` turns it into a dataclass, whose annotations
are the description of what is allowed. Nothing here knows bundles, cache entries or plans, and nothing here needs a
third-party package.
"""
from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import re
import stat
import types
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from flashgen.errors import FlashgenError

MAX_FILE_BYTES = 64 << 20  # a hundred times the largest kernel or manifest, and no strain on memory
MAX_DEPTH = 32             # a plan needs 6; the limit keeps Python's stack out of a file's reach
MAX_DIGITS = 20            # of a whole number: 64 bits have 19 and a sign
_SHOWN = 40                # characters of a refused value that an error repeats
_NO_BRACKET = bytes(set(range(256)) - set(b"[]{}"))


class BadFile(Exception):
    """What is wrong with a file's content: `problem` is what it does or is, `place` the field, "" for the whole."""

    def __init__(self, problem: str, *, allowed: str = "", place: str = "") -> None:
        super().__init__(problem)
        self.problem, self.allowed, self.place = problem, allowed, place

    def of(self, name: str) -> str:
        """A sentence about the file `name`."""
        return f"{name}: `{self.place}` {self.problem}" if self.place else f"{name} {self.problem}"

    def __str__(self) -> str:
        return self.of("it") + (f", allowed: {self.allowed}" if self.allowed else "")


@dataclass(frozen=True)
class Rule:
    """A check of one value, as metadata of typing.Annotated. `allowed` says what passes."""

    allowed: str
    holds: Callable[[Any], object]


def between(low: int, high: int) -> Rule:
    return Rule(f"a whole number from {low} to {high}", lambda value: low <= value <= high)


def spelled(pattern: str, allowed: str) -> Rule:
    return Rule(allowed, re.compile(pattern).fullmatch)


def one_of(values: Collection[object]) -> Rule:
    return Rule(", ".join(map(str, values)), lambda value: value in values)


def with_keys(*names: Collection[str]) -> Rule:
    """For a dict: exactly these keys, or exactly those."""
    return Rule("an object with " + ", or ".join(", ".join(each) for each in names),
                lambda value: any(value.keys() == set(each) for each in names))


Bytes = Annotated[int, between(0, 2**31 - 1)]
Count = Annotated[int, between(0, 2**31 - 1)]
Name = Annotated[str, spelled(r"[A-Za-z_][A-Za-z0-9_]{0,199}", "a C identifier of at most 200 characters")]
Arch = Annotated[str, spelled(r"sm_[0-9]{2,3}[a-z]?|gfx[0-9]{3,4}", "the name of a target, as sm_90a")]
Sha256 = Annotated[str, spelled(r"[0-9a-f]{64}", "64 hexadecimal digits")]


def read_file(path: Path, max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """The bytes of a regular file, or of what a symbolic link to one leads to.

    Raises OSError where it cannot be read, and BadFile if it is anything else or longer than `max_bytes`.
    """
    try:
        # Opening a FIFO would wait for its writer.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as err:
        raise BadFile("is a name that no file can have", allowed="a name without NUL, in the file system's encoding"
                      ) from err
    try:
        mode = os.fstat(handle).st_mode
        if not stat.S_ISREG(mode):
            kind = "a folder" if stat.S_ISDIR(mode) else "a FIFO" if stat.S_ISFIFO(mode) else "a device"
            raise BadFile(f"is {kind}", allowed="a file")
        with open(handle, "rb", closefd=False) as file:
            data = file.read(max_bytes + 1)
    finally:
        os.close(handle)
    if len(data) > max_bytes:
        raise BadFile(f"has more than {max_bytes} bytes", allowed=f"{max_bytes} bytes at most")
    return data


def show_path(path: Path) -> str:
    """The path, escaped where a terminal or a log could not print it."""
    return str(path) if str(path).isprintable() else ascii(str(path))


def text_of(data: bytes) -> str:
    """BadFile unless it is UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError as err:
        raise BadFile(f"has byte 0x{data[err.start]:02x} at offset {err.start}, which is not UTF-8",
                      allowed="text in UTF-8") from None


def parse_json(data: bytes | str) -> Any:
    """The value of a JSON text. BadFile if it is none, or is one that readers would take in different ways."""
    text = data if isinstance(data, str) else text_of(data)
    if _depth(text) > MAX_DEPTH:
        raise BadFile("is nested too deeply", allowed=f"{MAX_DEPTH} levels")
    try:
        return json.loads(text, object_pairs_hook=_object, parse_int=_whole, parse_float=_float,
                          parse_constant=_constant)
    except json.JSONDecodeError as err:
        raise BadFile(f"is not JSON (line {err.lineno}, column {err.colno}: {err.msg})", allowed="valid JSON") from None


def _depth(text: str) -> int:
    """How deep brackets are nested, or a number past MAX_DEPTH: seen before a parser that recurses sees them."""
    outside = "".join(text.replace("\\\\", "").replace('\\"', "").split('"')[::2])  # what is in no string
    depth = deepest = 0
    for bracket in outside.encode(errors="replace").translate(None, _NO_BRACKET):
        depth += 1 if bracket in b"[{" else -1
        deepest = max(deepest, depth)
        if deepest > MAX_DEPTH:
            break
    return deepest


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise BadFile(f"has the key {_shown(key)} twice in one object", allowed="each key once")
        found[key] = value
    return found


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise BadFile(f"has a number of {len(digits)} digits", allowed="numbers of 64 bits")
    return int(digits)


def _float(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else _constant(_shown(digits))


def _constant(name: str) -> float:
    raise BadFile(f"has the number {name}", allowed="finite numbers")


def build(value: Any, kind: Any) -> Any:
    """`value`, as parse_json gives it, as a `kind`: a dataclass or NamedTuple (an object with exactly its fields),
    `tuple[X, ...]` or `tuple[X, Y]` (a list), `dict[str, X]`, `X | None`, Annotated with Rules, str, int, float, bool,
    or object (scalars, and lists of such). BadFile names the place that is of another type, or breaks a rule.
    """
    return _reader(kind)(value)


@functools.cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """The function that checks and converts one value to a `kind`."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return functools.partial(_ruled, _reader(arguments[0]), arguments[1:])
    if origin in (Union, types.UnionType):
        some = _reader(arguments[0])
        return lambda value: None if value is None else some(value)
    if origin is tuple:
        kinds = tuple(_reader(each) for each in arguments if each is not Ellipsis)
        return functools.partial(_tuple, kinds, arguments[-1] is Ellipsis)
    if origin is dict:
        return functools.partial(_dict, _reader(arguments[1]))
    return _SCALARS.get(kind) or functools.partial(_record, kind, _fields(kind))


def _fields(kind: Any) -> dict[str, Callable[[Any], Any]]:
    """The fields of a dataclass or a NamedTuple, and what reads each."""
    hints = get_type_hints(kind, include_extras=True)
    names = [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else kind._fields
    return {name: _reader(hints[name]) for name in names}


def _ruled(read: Callable[[Any], Any], rules: tuple[Rule, ...], value: Any) -> Any:
    made = read(value)
    for rule in rules:
        if not rule.holds(made):
            raise BadFile(f"is {_shown(value)}", allowed=rule.allowed)
    return made


def _tuple(kinds: tuple[Callable[[Any], Any], ...], any_length: bool, value: Any) -> tuple[Any, ...]:
    rows = _typed(value, list, "a list")
    if not any_length and len(rows) != len(kinds):
        raise BadFile(f"is a list of {len(rows)}", allowed=f"a list of {len(kinds)}")
    return tuple(_inside(f"[{i}]", read, row)
                 for i, (read, row) in enumerate(zip(kinds * len(rows) if any_length else kinds, rows, strict=True)))


def _dict(read: Callable[[Any], Any], value: Any) -> dict[str, Any]:
    return {_text(key): _inside(key, read, row) for key, row in _typed(value, dict, "an object").items()}


def _record(kind: Any, fields: dict[str, Callable[[Any], Any]], value: Any) -> Any:
    rows = _typed(value, dict, "an object")
    if rows.keys() != fields.keys():
        lacking, unknown = [n for n in fields if n not in rows], [n for n in rows if n not in fields]
        raise BadFile(f"lacks `{lacking[0]}`" if lacking else f"has {_shown(unknown[0])}", allowed=", ".join(fields))
    made = {name: _inside(name, read, rows[name]) for name, read in fields.items()}
    try:
        return kind(**made)
    except FlashgenError as err:  # a rule between fields
        raise BadFile(f"is not allowed: {err.what}", allowed=err.allowed) from None


def _inside(name: str, read: Callable[[Any], Any], value: Any) -> Any:
    """A part of a value. Places are put together on the way out of an error, so that whole files cost nothing."""
    try:
        return read(value)
    except BadFile as err:
        shown = name if name.startswith("[") or name.isidentifier() else _shown(name)
        dot = "." if err.place and not err.place.startswith("[") else ""
        raise BadFile(err.problem, allowed=err.allowed, place=f"{shown}{dot}{err.place}") from None


def _frozen(value: Any) -> Any:
    """A value of no fixed type; parse_json has bounded its depth."""
    if isinstance(value, list):
        return tuple(_inside(f"[{i}]", _frozen, item) for i, item in enumerate(value))
    if isinstance(value, dict):
        raise BadFile("is an object", allowed="a text, a number, true, false, null, or a list of such")
    return value if value is None else _SCALARS[type(value)](value)


def _text(value: Any) -> str:
    text: str = _typed(value, str, "a text")
    if "\0" in text or (not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text)):
        raise BadFile(f"is {_shown(text)}", allowed="text without NUL and without halves of characters")
    return text


def _int(value: Any) -> int:
    number: int = _typed(value, int, "a whole number")
    if not -2**63 <= number < 2**63:
        raise BadFile(f"is {value}", allowed="a whole number of 64 bits")
    return number


def _bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise BadFile(f"is {_shown(value)}", allowed="true or false")
    return value


_SCALARS: dict[Any, Callable[[Any], Any]] = {
    str: _text, int: _int, bool: _bool, float: lambda value: float(_typed(value, (int, float), "a number")),
    object: _frozen}


def _typed(value: Any, kinds: type | tuple[type, ...], allowed: str) -> Any:
    if not isinstance(value, kinds) or isinstance(value, bool):  # Python's True is an int
        raise BadFile(f"is {_shown(value)}", allowed=allowed)
    return value


def _shown(value: Any) -> str:
    """A value in an error: printable on any terminal, and short."""
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."

