"""What editors and people read about specs, made from the same table as the checks.

`python -m flashgen.codegen.spec.docs > specs/README.md` writes the page; a test keeps it fresh.
"""
from __future__ import annotations

from typing import Any

from flashgen.codegen.spec.fields import Row, allowed, rows
from flashgen.codegen.spec.rules import RULES
from flashgen.codegen.spec.show import show


def json_schema() -> dict[str, Any]:
    """JSON schema of a spec file: a field may also be a list, and `exclude` and `overrides` may stand beside them."""
    fields = {row.name: _value_or_list(row) for row in rows()}
    settable = {row.name: _value(row) for row in rows() if row.override}
    override = _mapping({"when": _mapping(fields, minProperties=1), "set": _mapping(settable, minProperties=1)},
                        required=["when", "set"])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "flashgen spec",
        **_mapping(
            fields | {
                "exclude": {"description": "variants to leave out: partial matches", "type": "array", "minItems": 1,
                            "items": _mapping(fields, minProperties=1)},
                "overrides": {"description": "what to set in matching variants; the last match wins",
                              "type": "array", "minItems": 1, "items": override},
            },
            required=[row.name for row in rows() if row.required]),
    }


def _mapping(properties: dict[str, Any], **limits: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False, **limits}


def _value(row: Row) -> dict[str, Any]:
    schema = dict(row.schema)
    if row.parts:
        parts = {part.name.rpartition(".")[2]: _value(part) for part in row.parts}
        schema = _mapping(parts, required=list(parts))
    if row.nullable:
        schema = {"anyOf": [schema, {"type": "null"}]}
    default = {} if row.required else {"default": row.default or {} if row.name == "params" else row.default}
    about = row.about + (f" [{row.unit}]" if row.unit else "") + (f" (only {row.families})" if row.families else "")
    return {"description": about, **default, **schema}


def _value_or_list(row: Row) -> dict[str, Any]:
    value = _value(row)
    if row.name in ("name", "params"):  # the same for all of a file
        return value
    about: dict[str, Any] = {key: value.pop(key) for key in ("description", "default") if key in value}
    return {**about, "anyOf": [value, {"type": "array", "items": value, "minItems": 1, "uniqueItems": True}]}


def fields_markdown() -> str:
    """specs/README.md: every field with its unit, allowed values, default and family, and the rules between fields."""
    lines = [_HEAD, "| field | meaning | unit | allowed | default | family |", "|---|---|---|---|---|---|"]
    for top in rows():
        for row in (top, *top.parts):
            default = "required" if row.required else "" if row.default in (None, ()) else show(row.default)
            cells = (f"`{row.name}`", row.about, row.unit, "see below" if row.parts else allowed(row), default,
                     row.families)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    rules = "\n".join(f"- {rule.about}" for rule in RULES)
    override = ", ".join(f"`{row.name}`" for row in rows() if row.override)
    return "\n".join(lines) + "\n" + _TAIL.format(override=override, rules=rules)


_HEAD = """\
# Specs

One YAML file per kernel family. A field takes one value or a list; lists multiply into variants, the last field of
the table fastest. This page is made from the table that checks the files (`python -m flashgen.codegen.spec.docs`).
"""
_TAIL = """
## Rules between fields

- A field with a family in the last column is refused in specs of the others.
{rules}

## Lists, exclude and overrides

```yaml
arch: [sm_80, sm_90]        # two values: two variants of everything below
causal: [false, true]
window: [false, true]
exclude:                    # partial matches; a value may be a list, which means any of them
  - {{causal: true, window: true}}
overrides:                  # applied after exclude, in order; of two that set the same field the last wins
  - when: {{arch: sm_80, head_dim_qk: [192, 256]}}
    set: {{stages: 2, tile: {{m: 64, n: 32}}}}
```

- `set` takes only {override}; what is not set, the plan decides.
- `name` is one per file. Files may share a name as long as their variants differ.
- An entry, or a value in it, that matches no variant is an error. So are unknown keys, a key or a list value given
  twice, an empty list, and two variants of one name.
- `head_dim_v` takes the value of `head_dim_qk` before exclude looks at it.
- YAML 1.1 reads `on`, `yes`, `010`, `0x40`, `1_000` and `1:30` as something else than text or decimal numbers: these
  are refused. Write `true` and `false`, decimal numbers, or quoted text. Anchors and merge keys work.
"""

if __name__ == "__main__":
    print(fields_markdown(), end="")
