"""The reader of files: what is no regular file, no JSON, or of another type is refused with file and field."""
from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgen import files
from flashgen.files import BadFile, between, build, one_of, parse_json, read_file, spelled, text_of, with_keys


def refused(action: Callable[[], object], problem: str) -> BadFile:
    with pytest.raises(BadFile) as caught:
        action()
    assert problem in caught.value.of("f.json") and "\0" not in caught.value.of("f.json")
    caught.value.of("f.json").encode()  # any terminal can print it
    return caught.value


# -- files


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"12345")
    (tmp_path / "link").symlink_to(path)
    assert read_file(path, 5) == b"12345" and read_file(tmp_path / "link", 5) == b"12345"
    refused(lambda: read_file(path, 4), "f.json has more than 4 bytes")


def test_what_is_no_regular_file_is_refused_without_waiting_for_it(tmp_path: Path) -> None:  # B134
    os.mkfifo(tmp_path / "fifo")  # without a writer: a plain open would wait for ever
    refused(lambda: read_file(tmp_path / "fifo"), "f.json is a FIFO")
    refused(lambda: read_file(tmp_path), "f.json is a folder")
    refused(lambda: read_file(Path("/dev/zero")), "f.json is a device")
    refused(lambda: read_file(tmp_path / "a\0b"), "f.json is a name that no file can have")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(tmp_path / "socket"))
        for name in ("loop", "absent", "socket", "x" * 300):
            with pytest.raises(OSError):
                read_file(tmp_path / name)


# -- JSON


@pytest.mark.parametrize(("text", "problem"), [
    ("[" * 200_000, "is nested too deeply"), ('{"a":' * 200_000, "is nested too deeply"),
    ("[" * 33 + "]" * 33, "is nested too deeply"), ('["\\\\",' + "[" * 33, "is nested too deeply"),
    ('["]]]]]",' * 40, "is nested too deeply"), ('["\\"]",' * 40, "is nested too deeply"),
    ('{"a": 1, "b": {"a": 2, "a": 2}}', 'has the key "a" twice'), ('{"\\ud800": 1, "\\ud800": 1}', '"\\ud800" twice'),
    ("[NaN]", "has the number NaN"), ("[-Infinity]", "has the number -Infinity"), ("[1e999]", 'the number "1e999"'),
    ("[" + "9" * 21 + "]", "has a number of 21 digits"), ("[" + "9" * 100_000 + "]", "a number of 100000 digits"),
    ("", "is not JSON (line 1, column 1"), ("{}\n{}", "is not JSON (line 2, column 1"), ("[1,]", "is not JSON"),
    ("\ufeff{}", "is not JSON"), ("{'a': 1}", "is not JSON"), ('["\t"]', "is not JSON"),
    ('["' + "\\" * 101, "not JSON"),
])
def test_only_json_that_means_one_thing_is_read(text: str, problem: str) -> None:
    refused(lambda: parse_json(text), problem)
    refused(lambda: parse_json(text.encode()), problem)


def test_bytes_that_are_no_utf8_are_refused() -> None:
    for data in (b'{"a": "\xff"}', "{}".encode("utf-16"), b'"\xed\xa0\x80"'):
        refused(lambda data=data: parse_json(data), "is not UTF-8")  # type: ignore[misc]
    assert text_of("\u2264".encode()) == "\u2264"


def test_brackets_in_strings_are_no_depth() -> None:
    value = {"a\\": "[" * 100, '"[[': ["{" * 100, "\\\"[" * 40], "\\\\": []}
    assert parse_json(json.dumps(value)) == value
    deep: Any = 0
    for _ in range(files.MAX_DEPTH):
        deep = [deep]
    assert parse_json(json.dumps(deep)) == deep


def test_depth_is_seen_before_a_parser_that_recurses() -> None:
    """With a small stack and a high limit of recursion json alone would end the process."""
    limit, seen = sys.getrecursionlimit(), list[str]()

    def read() -> None:
        try:
            parse_json("[" * 1_000_000)
        except BadFile as err:
            seen.append(err.problem)

    sys.setrecursionlimit(2_000_000)
    try:
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
    finally:
        sys.setrecursionlimit(limit)
    assert seen == ["is nested too deeply"]


SCALARS = st.none() | st.booleans() | st.integers(-2**63, 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(SCALARS | st.text(), lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
    st.text(), inner, max_size=4), max_leaves=12)


@settings(deadline=None, max_examples=100, derandomize=True)
@given(JSON, st.booleans())
def test_plain_json_comes_back_as_it_was(value: Any, ascii_only: bool) -> None:
    assert parse_json(json.dumps(value, ensure_ascii=ascii_only)) == value


# -- types


class Pair(NamedTuple):
    left: int
    right: str


@dataclass(frozen=True)
class Inner:
    size: Annotated[int, between(1, 8)]
    name: Annotated[str, spelled("[a-z]+", "lower-case letters")]


@dataclass(frozen=True)
class Outer:
    rows: tuple[Inner, ...]
    pair: Pair
    files: Annotated[dict[str, float], with_keys(("a.b", "c"))]
    kind: Annotated[str, one_of(("x", "y"))] | None
    free: tuple[tuple[str, object], ...]
    on: bool


GOOD: dict[str, Any] = {
    "rows": [{"size": 8, "name": "a"}], "pair": {"left": -2**63, "right": "\u2264"}, "files": {"a.b": 1, "c": 0.5},
    "kind": None, "free": [["p", [1, [True, None, "x", 2.5]]]], "on": False}


def test_a_value_of_the_right_types_is_built() -> None:
    made = build(GOOD, Outer)
    assert made == Outer((Inner(8, "a"),), Pair(-2**63, "\u2264"), {"a.b": 1.0, "c": 0.5}, None,
                         (("p", (1, (True, None, "x", 2.5))),), False)
    assert isinstance(made.pair, Pair) and build({**GOOD, "kind": "y"}, Outer).kind == "y"


@pytest.mark.parametrize(("changes", "message", "allowed"), [
    ({"rows": {}}, "`rows` is an object", "a list"), ({"files": []}, "`files` is a list", "an object"),
    ({"rows": [{"size": 0, "name": "a"}]}, "`rows[0].size` is 0", "a whole number from 1 to 8"),
    ({"rows": [{"size": True, "name": "a"}]}, "`rows[0].size` is true", "a whole number"),
    ({"rows": [{"size": 1.0, "name": "a"}]}, "`rows[0].size` is 1.0", "a whole number"),
    ({"rows": [{"size": 1}]}, "`rows[0]` lacks `name`", "size, name"),
    ({"rows": [{"size": 1, "name": "../a"}]}, '`rows[0].name` is "../a"', "lower-case letters"),
    ({"rows": [{"size": 1, "name": "a", "b\n": 1}]}, '`rows[0]` has "b\\n"', "size, name"),
    ({"pair": [1, "x"]}, "`pair` is a list", "an object"),
    ({"pair": {"left": 2**63, "right": ""}}, "`pair.left` is", "64 bits"),
    ({"pair": {"left": 0, "right": "a\0"}}, '`pair.right` is "a\\u0000"', "text without NUL"),
    ({"pair": {"left": 0, "right": "\ud800"}}, '`pair.right` is "\\ud800"', "text without NUL"),
    ({"files": {"a.b": "1", "c": 1}}, '`files."a.b"` is "1"', "a number"), ({"files": {"c": 1}}, "`files` is an object",
                                                                            "an object with a.b, c"),
    ({"kind": "z"}, '`kind` is "z"', "x, y"), ({"kind": []}, "`kind` is a list", "a text"),
    ({"free": [["p"]]}, "`free[0]` is a list of 1", "a list of 2"),
    ({"free": [["p", {}]]}, "`free[0][1]` is an object", "a text, a number"),
    ({"free": [["p", [2**64]]]}, "`free[0][1][0]` is", "64 bits"), ({"on": 1}, "`on` is 1", "true or false"),
    ({"free": [["p", ["\0"]]]}, '`free[0][1][0]` is "\\u0000"', ""), ({"on": "x" * 500}, "x...", "true or false"),
])
def test_another_type_is_told_with_its_place_and_what_is_allowed(
        changes: dict[str, Any], message: str, allowed: str) -> None:
    err = refused(lambda: build({**GOOD, **changes}, Outer), message)
    assert allowed in err.allowed and len(err.of("f.json")) < 120


def test_what_lacks_or_has_too_many_keys_is_refused() -> None:
    for name in GOOD:
        refused(lambda name=name: build({k: v for k, v in GOOD.items() if k != name}, Outer),  # type: ignore[misc]
                f"f.json lacks `{name}`")
    refused(lambda: build({**GOOD, "more": 1}, Outer), 'f.json has "more"')
    refused(lambda: build([], Outer), "f.json is a list")
