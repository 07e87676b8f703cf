"""Damage for files: JSON with one place changed, whether or not the result is still JSON, and bytes that moved."""
from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import strategies as st

from flashgen.files import BadFile, parse_json
from flashgen.runtime.compile.entry import signed

_HERE, _TWICE = "@here@", "@twice@"  # stand for text that json.dumps would never write
# Raw JSON, and what only looks like it.
JUNK = ["null", "true", "-1", "0", "2147483648", "9223372036854775808", "1" * 40, "9" * 5000, "1.5", "1e999", "NaN",
        "-Infinity", '""', '"\\u0000"', '"x\\ud800"', '"../../../etc/passwd"', '"/etc/passwd"', '"a/b"',
        '"\\u001b[31m"', '"' + "x" * 300 + '"', "[]", "{}", "[[]]", '[["a", 1], [2]]', "[" * 100_000,
        "[" * 100_000 + "]" * 100_000, '{"a": ' * 1000 + "1" + "}" * 1000, '{"a": 1, "a": 2}', '{"": null}', "", "\t"]


def _places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value in a tree, the root's () too."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, row in inside for place in _places(row, (*at, key)))]


def _get(tree: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        tree = tree[key]
    return tree


@st.composite
def damaged_json(draw: st.DrawFn, text: str) -> str:
    """`text` with one value replaced, removed, doubled, added, wrapped, or exchanged for another of the file's own."""
    tree = {"": json.loads(text)}
    places = _places(tree)[1:]
    place = draw(st.sampled_from(places))
    parent, key = _get(tree, place[:-1]), place[-1]
    junk = draw(st.sampled_from(JUNK))
    edit = draw(st.sampled_from(["junk", "junk", "junk", "remove", "double", "add", "wrap", "exchange"]))
    if edit == "junk" or place == ("",):
        parent[key] = _HERE
    elif edit == "remove":
        del parent[key]
    elif edit == "double" and isinstance(parent, dict):
        parent[_TWICE] = parent[key]
    elif edit == "add":
        parent.update({"more": _HERE}) if isinstance(parent, dict) else parent.append(_HERE)
    elif edit == "wrap":
        parent[key] = draw(st.sampled_from([[parent[key]], {"a": parent[key]}]))
    else:
        parent[key] = copy.deepcopy(_get(tree, draw(st.sampled_from(places))))
    return json.dumps(tree[""]).replace(f'"{_HERE}"', junk).replace(f'"{_TWICE}"', json.dumps(key))


@st.composite
def damaged_bytes(draw: st.DrawFn, data: bytes) -> bytes:
    """`data` with one byte changed, cut short, or longer."""
    at = draw(st.integers(0, len(data) - 1))
    edit = draw(st.sampled_from(["flip", "set", "cut", "insert"]))
    if edit == "cut":
        return data[:at]
    extra = bytes([draw(st.integers(0, 255))])
    if edit == "insert":
        return data[:at] + extra + data[at:]
    changed = bytes([data[at] ^ 1 << draw(st.integers(0, 7))]) if edit == "flip" else extra
    return data[:at] + changed + data[at + 1:]


def signed_again(text: str) -> bytes:
    """The file with the right digest for its content where it has a content: damage that no checksum shows."""
    try:
        fields = parse_json(text)
        if isinstance(fields, dict):
            text = json.dumps(signed({name: value for name, value in fields.items() if name != "digest"}))
    except BadFile:
        pass  # no digest makes JSON of it
    return text.encode()
