"""Values of spec fields as error texts and pages spell them."""
from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Trap:
    """A scalar that no field takes: `text` as written, `read` as YAML 1.1 reads it (None if it cannot)."""

    text: str
    read: object = None

    def __str__(self) -> str:
        return self.text


def show(value: object) -> str:
    """A value as YAML would spell it, short enough for one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "null"
    if type(value) is int:
        text = str(value) if abs(value) < 10**20 else f"a number of {value.bit_length()} bits"
    elif type(value) in (float, Trap):
        text = str(value)
    elif type(value) is str:
        text = value if value.isascii() and re.fullmatch(r"[A-Za-z]\w*", value) else ascii(value)
    elif hasattr(type(value), "model_fields"):  # a pydantic model; who shows values need not have pydantic
        text = "{" + ", ".join(f"{key}: {show(part)}" for key, part in vars(value).items()) + "}"
    elif isinstance(value, (dict, list, tuple)):
        text = "a mapping" if isinstance(value, dict) else "a list"
    else:
        text = f"an object of type {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."
