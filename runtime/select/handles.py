"""What `spec=` names, as text: a handle.

A handle is part of memo keys, of graphs that torch.compile makes, and of exported programs, which another process runs.
It therefore says all that is needed to find the spec again. It is one of
- the name of a shipped spec file without its suffix,
- the absolute path of a spec file,
- `variant {...}` or `spec {...}`, the fields as JSON.
"""
from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

from flashgen.codegen.expr.tree import Param, ScalarParam
from flashgen.codegen.families.registry import pass_of
from flashgen.codegen.spec.expressions import plain_params
from flashgen.errors import SpecError, UnsupportedError
from flashgen.runtime.select.variant import Variant, as_json, variant

if TYPE_CHECKING:
    from flashgen.codegen.spec.spec import Spec

MEMO_LIMIT = 1024
# After a handle, before its parameters: their signature has none. No line break: Inductor writes the arguments of calls
# into comments of the code that it makes.
SEPARATOR = "\t"
_VARIANT, _SPEC = "variant ", "spec "
_fixed: set[str] = set()  # names and paths that mean the same in every working directory
_paths: dict[tuple[str, str], str] = {}       # (path as written, working directory) -> handle
_specs: dict[int, tuple[Spec, str]] = {}      # by id, which the Spec beside it keeps from being given away


class Form(NamedTuple):
    """What a call needs to know of its spec to sort the values of parameters."""

    handle: str
    text: str    # handle and signature of the parameters: what attention's ops take as `spec`
    params: tuple[tuple[str, str, str], ...]  # (name, type, default as text or "") of what is read
    unread: tuple[str, ...]  # names that are declared, and gone from the canonical form


def handle_of(spec: str | os.PathLike[str] | Spec | Variant) -> str:
    """The handle of what a caller gives as `spec`. A relative path is looked up once per working directory."""
    if type(spec) is str and spec in _fixed:
        return spec
    if isinstance(spec, Variant):
        return spec.handle
    if _is_spec(spec):
        found = _specs.get(id(spec))
        if found is None:
            if len(_specs) >= MEMO_LIMIT:
                _specs.clear()
            fields = {name: getattr(spec, name) for name, info in type(spec).model_fields.items()
                      if getattr(spec, name) != info.default}
            found = _specs[id(spec)] = spec, _SPEC + as_json({**fields, "params": plain_params(spec.params)})
        return found[1]
    path = os.fspath(spec) if isinstance(spec, (str, os.PathLike)) else None
    if not isinstance(path, str):
        raise UnsupportedError(f"spec is of type {type(spec).__name__}", where="spec",
                               allowed="the name of a shipped spec, a path, a Spec, or what flashgen.variant gives")
    return _path_handle(path)


handle_of._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compile calls it while it traces


def _is_spec(value: object) -> TypeGuard[Spec]:
    """Whether it is a Spec. Whoever has one has imported its module, which a call from a bundle does without."""
    return isinstance(value, getattr(sys.modules.get("flashgen.codegen.spec.fields"), "Spec", ()))


def _path_handle(text: str) -> str:
    if text in _shipped_names() or os.path.isabs(text):
        if len(_fixed) >= MEMO_LIMIT:
            _fixed.clear()
        _fixed.add(text)
        return text
    try:
        key = text, os.getcwd()
    except OSError as error:
        raise SpecError(f"a relative path, and the working directory cannot be read: {error.strerror}", where=text,
                        allowed="an absolute path, or the name of a shipped spec") from None
    found = _paths.get(key)
    if found is None:
        from flashgen.codegen.spec.spec import spec_path

        path = spec_path(text)
        found = path.stem if path in _shipped_names().values() else os.path.abspath(path)
        if len(_paths) >= MEMO_LIMIT:
            _paths.clear()
        if os.path.exists(path):
            _paths[key] = found
    return found


@functools.cache
def _shipped_names() -> dict[str, Path]:
    from flashgen.codegen.spec.spec import shipped_spec_paths, variant_spec_paths

    return {path.stem: path for path in (*shipped_spec_paths(), *variant_spec_paths())}


def forget_paths() -> None:
    _paths.clear()


def opened(handle: str) -> Variant | tuple[Spec, ...]:
    """What a handle names: read from its file, or made anew from its JSON. Raises SpecError."""
    from flashgen.codegen.spec.spec import Spec, load_specs, spec_path

    for prefix, make in ((_VARIANT, lambda fields: variant(**fields)),
                         (_SPEC, lambda fields: with_siblings(Spec(**fields)))):
        if handle.startswith(prefix):
            try:
                fields = json.loads(handle[len(prefix):])
            except (ValueError, RecursionError):
                fields = None
            if not isinstance(fields, dict):
                raise SpecError(f"{title(handle)} is no JSON object", where="spec", allowed="what flashgen wrote")
            return make(fields)
    return load_specs(spec_path(handle)).specs


def with_siblings(spec: Spec) -> tuple[Spec, ...]:
    """The specs of all kernels that a call of this one launches."""
    return tuple(spec.with_(**dict(traits)) for traits in pass_of(spec).kernels)


def title(handle: str) -> str:
    """A handle for messages: a path or name as it is, else the name among the fields."""
    kind, brace, rest = handle.partition("{")
    if not brace or kind not in (_VARIANT, _SPEC):
        return handle
    name = rest.partition('"name":"')[2].partition('"')[0]
    return f"{kind}{name[:40]}"


def signature(params: Sequence[Param]) -> str:
    """Names and types in the order in which values travel: ints and bools, floats, tensors, each in this order."""
    return ", ".join(f"{p.name}: {p.type if isinstance(p, ScalarParam) else 'tensor'}" for p in params)


def form(handle: str, params: Sequence[Param], declared: Sequence[str]) -> Form:
    """`params`: what the expressions read. `declared`: names of all that the spec declares."""
    rows = [(p.name, p.type, "" if p.default is None else repr(p.default)) if isinstance(p, ScalarParam)
            else (p.name, "tensor", "") for p in params]
    read = {name for name, *_ in rows}
    return Form(handle, handle + SEPARATOR + signature(params), tuple(rows),
                tuple(name for name in declared if name not in read))
