"""The table of spec fields: one pydantic model from which checks, error texts, schema and documentation come.

A Spec is one variant for one target: scalars only. spec.py makes Specs out of files whose fields may be lists. Its
fields are those that all families have, in Common, and the options of each family.
"""
from __future__ import annotations

import difflib
import functools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PlainSerializer,
    ValidationError,
    create_model,
    model_validator,
)

from flashgen.codegen.dtype import DTYPES
from flashgen.codegen.expr.parse import MAX_TEXT
from flashgen.codegen.expr.tree import DIMS, SCOPE_NAMES
from flashgen.codegen.families.family import Option
from flashgen.codegen.families.registry import FAMILIES, implied_family, pass_of, passes
from flashgen.codegen.spec import expressions as spec_expr
from flashgen.codegen.spec import rules as spec_rules
from flashgen.codegen.spec.rule import EXTRA
from flashgen.codegen.spec.show import Trap, show
from flashgen.codegen.target import TARGETS
from flashgen.errors import SpecError, together

if TYPE_CHECKING:  # a checker cannot read a Literal made from a table
    Arch = str
    DTypeName = str
    FamilyName = str
    PassName = str
else:
    Arch = Literal[tuple(TARGETS)]
    DTypeName = Literal[tuple(DTYPES)]
    FamilyName = Literal[tuple(FAMILIES)]
    PassName = Literal[tuple(passes())]

MAX_HEAD_DIM = 576  # the largest of any family; most stop earlier
NAME_PATTERN = r"^[a-z][a-z0-9]*(_[a-z0-9]+)*$"  # no double underscore: C++ reserves those


def _row(about: str, unit: str = "", *, override: bool = False, families: str = "", words: str = "", **limits: Any
         ) -> Any:
    """`families`: those that have the field, if not all do. `words`: what is allowed, where limits do not say it."""
    extra: dict[str, Any] = {"unit": unit, "override": override, "families": families, "words": words}
    return Field(description=about, json_schema_extra=extra, **limits)


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", populate_by_name=True)


class Tile(_Frozen):
    m: Annotated[int, _row("query rows of one block", "rows", ge=16, le=256, multiple_of=16)]
    n: Annotated[int, _row("key/value rows of one pipeline stage", "rows", ge=16, le=256, multiple_of=16)]


class Roles(_Frozen):
    mma: Annotated[int, _row("warps that multiply and keep the softmax state", "warps", ge=1, le=16)]


class Common(_Frozen):
    """One variant for one target: the fields that all families have, though some take one value of them.

    Every way to make one raises SpecError, and nothing else, on a bad value.
    """

    name: Annotated[str, _row("first part of the kernels' names", pattern=NAME_PATTERN, max_length=64)]
    family: Annotated[FamilyName, _row("algorithm, a folder of codegen/families")]
    pass_: Annotated[PassName, _row("; ".join(f"{found.name}: {found.about}" for found in passes().values()),
                                    alias="pass")]
    arch: Annotated[Arch, _row("compilation target, as NVRTC spells it")]
    dtype: Annotated[DTypeName, _row("element type of q, k, v and out")]
    head_dim_qk: Annotated[int, _row(
        "columns of q and k", "elements", ge=8, le=MAX_HEAD_DIM, multiple_of=8)]
    head_dim_v: Annotated[int, _row(
        "columns of v and out; nothing means head_dim_qk", "elements", ge=8, le=MAX_HEAD_DIM, multiple_of=8,
    )] = None  # type: ignore[assignment]  # the validator below fills it in, so readers always see an int
    causal: Annotated[bool, _row("query i sees keys j <= i + seqlen_kv - seqlen_q only")] = False
    window: Annotated[bool, _row(
        "bounds left and right of the diagonal come with each call; also serves a causal call, with right = 0")] = False
    kv_layout: Annotated[Literal["dense", "varlen", "paged"], _row(
        "dense: [batch, seqlen, heads, dim]; varlen: packed rows with cu_seqlens; paged: a cache of pages, and a table "
        "of each request's")] = "dense"
    score: Annotated[str, _row(
        "what becomes of a score, already scaled, before the mask: softcap * tanh(score / softcap)",
        words=f"an expression of {', '.join(SCOPE_NAMES)} and params; or none",
        max_length=MAX_TEXT)] = "none"
    mask: Annotated[str, _row(
        "which keys a query sees, in place of causal and window: kv_pos <= q_pos or kv_pos < prefix",
        words=f"an expression of {', '.join(name for name in SCOPE_NAMES if name != 'score')} and params; or none",
        max_length=MAX_TEXT)] = "none"
    params: Annotated[Any, BeforeValidator(spec_expr.checked_params), PlainSerializer(
        spec_expr.plain_params, when_used="json"), _row(
        "what expressions read of each call, by name. A tensor's dims are numbers or " + ", ".join(DIMS)
        + "; sorted: true promises an int32 tensor whose last dim never falls",
        words="{name: {type: int, float or bool, default: ...}} or {name: {type: tensor, dtype: ..., shape: [...]}}",
    )] = ()
    align: Annotated[Literal["bottom_right", "top_left"], _row(
        "where q_pos counts from in expressions: the last query stands at the last key, or the first at the first"
    )] = "bottom_right"
    sink: Annotated[Literal["none", "per_head"], _row(
        "per_head: a logit for each query head, parameter sink, that joins the denominator and lse")] = "none"
    normalize: Annotated[Literal["softmax", "none"], _row(
        "none: P of a visible key is its score itself, after the expression; needs lse: false")] = "softmax"
    lse: Annotated[bool, _row("the kernel can write lse")] = True
    batch_invariant: Annotated[bool, _row("a request's bits do not depend on its neighbours in the batch")] = False
    tile: Annotated[Tile | None, _row("block tile; nothing means that the plan decides", override=True)] = None
    stages: Annotated[int | None, _row(
        "key/value tiles in flight; nothing means that the plan decides", "tiles", override=True, ge=2, le=5)] = None
    roles: Annotated[Roles | None, _row("warps per role; nothing means that the plan decides", override=True)] = None

    @model_validator(mode="wrap")
    @classmethod
    def _refuse_with_spec_error(cls, data: Any, handler: ModelWrapValidatorHandler[Common]) -> Common:
        follows = isinstance(data, dict) and data.get("head_dim_v") is None
        if follows:
            data = {**data, "head_dim_v": data.get("head_dim_qk")}
        try:
            spec = handler(data)
        except ValidationError as error:
            found = problems_of(error, lambda loc, key: (".".join(("Spec", *loc)), ""))
            # a head_dim_v that only follows would repeat what is wrong with head_dim_qk
            raise together([p for p in found if not (follows and p.where == "Spec.head_dim_v")]) from None
        if wrong := spec._of_another_family() or spec_rules.broken(spec):
            raise wrong
        return spec

    def _of_another_family(self) -> SpecError | None:
        for row in rows():
            value, unset = getattr(self, row.attribute), show(row.default)
            owners = f"[{row.families}]" if "," in row.families else row.families
            if row.families and self.family not in row.families.split(", ") and value != row.default:
                return SpecError(
                    f"{row.name} is {show(value)} with family {self.family}, which has no such field",
                    where=f"Spec.{row.name}", allowed=f"{unset}; {row.name} is a field of {row.families}",
                    nearest=unset,
                    next=f"where family is a list, set it in overrides: `when: {{family: {owners}}}`"
                    if row.override else "when both are lists, add "
                    f"`- {{family: {self.family}, {row.name}: {show(value)}}}` to exclude")
        return None

    @property
    def variant(self) -> str:
        """The kernel's name without its target: a C identifier, and different for every difference but arch."""
        dims = f"d{self.head_dim_qk}" + (f"v{self.head_dim_v}" if self.head_dim_v != self.head_dim_qk else "")
        if pass_of(self).one_variant:
            return f"{self.name}_{self.pass_}"
        parts: list[tuple[object, str]] = [
            (True, f"{self.name}_{self.dtype}_{dims}"),
            (self.family != implied_family(self.name), self.family),
            (pass_of(self) != FAMILIES[self.family].passes[0] and self.pass_ not in self.name.split("_"), self.pass_),
            (self.causal, "causal"),
            (self.window, "window"),
            (self.kv_layout != "dense", self.kv_layout + "".join(self._short("kv_layout"))),
            (not self.lse, "nolse"),
            (self.batch_invariant, "inv"),
            (self.tile, f"m{self.tile.m}n{self.tile.n}" if self.tile else ""),
            (self.stages, f"s{self.stages}"),
            (self.roles, f"w{self.roles.mma}" if self.roles else ""),
            *((True, text) for text in self._short()),
            (self.align != "bottom_right", "topleft"),
            (self.sink != "none", "sink"),
            (self.normalize != "softmax", "sum"),
            (self.expressions, f"x{self.expressions.digest}"),
        ]
        return "_".join(text for present, text in parts if present)

    def _short(self, after: str = "") -> Iterator[str]:
        """Parts of the name that options add: those that detail the common field `after`, or the others."""
        for name, option in OPTIONS.items():
            value = getattr(self, name)
            if option.after == after and value != Spec.model_fields[name].default:
                yield option.short(value)

    @property
    def expressions(self) -> spec_expr.Expressions:
        return spec_expr.expressions(self)

    def fields(self) -> tuple[tuple[str, object], ...]:
        """(YAML name, value) in table order without arch; tile and roles as tuples of pairs, or None. Expressions in
        canonical form; what only variants with expressions have is left out of the others."""
        trees = self.expressions
        texts = {name: tree.text for name, tree in (("score", trees.score), ("mask", trees.mask)) if tree is not None}

        def plain(row: Row) -> object:
            value = getattr(self, row.attribute)
            if row.name == "params":
                return tuple(map(str, trees.params))
            return texts.get(row.name, tuple(value) if isinstance(value, BaseModel) else value)
        found = ((row, plain(row)) for row in rows() if row.name != "arch")
        return tuple((row.name, value) for row, value in found if row.name not in EXTRA or value != row.default)

    def with_(self, **changes: Any) -> Spec:
        """A checked copy. A head_dim_v equal to head_dim_qk follows it, unless it is named too. Raises SpecError."""
        values = {name: getattr(self, name) for name in Spec.model_fields}
        if self.head_dim_v == self.head_dim_qk:
            values["head_dim_v"] = None if "head_dim_qk" in changes else self.head_dim_v
        return Spec(**(values | changes))


OPTIONS: dict[str, Option] = {}  # the options of all families, by field


def _with_options() -> type[Common]:
    """Common with the options of each family. An option that several families have has one row."""
    owners: dict[str, list[str]] = {}
    found: dict[str, Any] = {}
    for family in FAMILIES.values():
        for name, hint in get_type_hints(family.options, include_extras=True).items():
            option: Option = hint.__metadata__[0]
            assert OPTIONS.setdefault(name, option) is option, name
            owners.setdefault(name, []).append(family.name)
            row = _row(option.about, option.unit, override=option.override, families=", ".join(owners[name]),
                       **option.limits)
            found[name] = Annotated[hint.__origin__, row], getattr(family.options, name)
    return create_model("Spec", __base__=Common, __module__=__name__, **found)


if TYPE_CHECKING:
    class Spec(Common):
        """Common with the options of all families, whose types the class Spec of a family's options.py knows."""

        def __getattr__(self, name: str) -> Any: ...
else:
    Spec = _with_options()


@dataclass(frozen=True)
class Row:
    """One line of the table, as read from the model: `schema` is the JSON schema of one value, null apart."""

    name: str       # in YAML; `tile.m` inside a mapping
    attribute: str  # in Python
    about: str
    unit: str
    schema: dict[str, Any]
    required: bool
    default: object
    override: bool
    families: str = ""  # the families that have it, if not all do
    words: str = ""     # what is allowed, where the schema does not say it
    parts: tuple[Row, ...] = ()

    @property
    def nullable(self) -> bool:
        return not self.required and self.default is None


@functools.cache
def rows() -> tuple[Row, ...]:
    found = list(_rows(Spec, ""))
    for row in [row for row in found if row.name in OPTIONS and OPTIONS[row.name].after]:
        found.remove(row)
        found.insert([other.name for other in found].index(OPTIONS[row.name].after) + 1, row)
    return tuple(found)


def _rows(model: type[BaseModel], prefix: str) -> Iterator[Row]:
    schema = model.model_json_schema()
    for attribute, info in model.model_fields.items():
        name = info.alias or attribute
        prop = schema["properties"][name]
        value = next(s for s in prop.get("anyOf", [prop]) if s.get("type") != "null")
        models: dict[str, type[BaseModel]] = {"Tile": Tile, "Roles": Roles}
        inner = models.get(value.get("$ref", "").rpartition("/")[2])
        limits = {"type": "object"} if inner or name == "params" else {
            key: value[key] for key in _LIMITS if key in value}
        yield Row(prefix + name, attribute, prop["description"], prop["unit"], limits, info.is_required(),
                  info.default, prop["override"], prop["families"], prop["words"],
                  tuple(_rows(inner, f"{name}.")) if inner else ())


_LIMITS = ("type", "enum", "const", "minimum", "maximum", "multipleOf", "pattern", "maxLength")


@functools.cache
def rows_by_name() -> dict[str, Row]:
    return {row.name: row for top in rows() for row in (top, *top.parts)}


def choices(row: Row) -> list[Any] | None:
    """Every allowed value, or None where there are too many to list."""
    schema = row.schema
    if schema["type"] == "boolean":
        return [False, True]
    if "minimum" in schema:
        return list(range(schema["minimum"], schema["maximum"] + 1, schema.get("multipleOf", 1)))
    return schema.get("enum", [schema["const"]] if "const" in schema else None)


def allowed(row: Row) -> str:
    """The allowed values in words, from the same limits that pydantic checks."""
    schema = row.schema
    if row.words:
        return row.words
    if row.parts:
        return "{" + ", ".join(f"{p.name.rpartition('.')[2]}: {allowed(p)}" for p in row.parts) + "}"
    if "minimum" in schema:
        step, low, high = schema.get("multipleOf", 1), schema["minimum"], schema["maximum"]
        return f"multiples of {step} from {low} to {high}" if step > 1 else f"whole numbers from {low} to {high}"
    if (values := choices(row)) is not None:
        return ", ".join(map(show, values))
    return f"lower-case words of letters and digits joined by _, at most {schema['maxLength']} characters"


def nearest(row: Row, value: object) -> str:
    """The allowed value nearest to a refused one, or an empty string where nothing is near."""
    if isinstance(value, Trap):
        value = value.text if row.schema["type"] == "string" else value.read
    if row.parts or row.words or type(value) not in (bool, int, float, str):
        return ""
    if row.schema["type"] == "integer":
        return _nearest_number(choices(row) or [], value)
    if row.schema["type"] == "boolean":
        words = {"true": "true", "yes": "true", "on": "true", "1": "true", "false": "false", "no": "false",
                 "off": "false", "0": "false"}
        return words.get(closest(show(value).strip("'").lower(), words), "")
    if (values := choices(row)) is not None:
        return closest(show(value).strip("'").lower(), values)
    text = re.sub(r"[^a-z0-9]+", "_", show(value)[:row.schema["maxLength"]].lower()).strip("_")
    return text if re.match(NAME_PATTERN, text) else ""


def _nearest_number(values: list[int], value: object) -> str:
    try:
        number = value if isinstance(value, int) else float(value)  # type: ignore[arg-type]
    except ValueError:
        return ""
    if isinstance(value, bool) or (isinstance(number, float) and math.isnan(number)):
        return ""
    number = min(max(number, values[0]), values[-1])  # first, so that neither inf nor a huge int meets a float
    return str(min(values, key=lambda candidate: abs(candidate - number)))


def closest(text: str, words: Any) -> str:
    """The most similar word, or an empty string where none is similar."""
    found = difflib.get_close_matches(text[:64], list(words), n=1, cutoff=0.3)
    return found[0] if found else ""


Locate = Callable[[tuple[str, ...], bool], tuple[str, str]]


def problems_of(error: ValidationError, locate: Locate, field: str = "") -> list[SpecError]:
    """pydantic's findings on a Spec, or on the value of one field, as SpecErrors.

    `locate` gives (where, note on the value) of a path below the value; its flag asks for the key instead.
    """
    found = []
    for item in error.errors(include_url=False, include_context=False):
        loc = tuple(str(key) for key in item["loc"])
        *parents, last = (field, *loc) if field else (loc or ("",))
        name = ".".join((*parents, last))
        row = rows_by_name().get(name)
        where, note = locate(loc, item["type"] == "extra_forbidden")
        if item["type"] == "extra_forbidden":
            siblings = [r.name for r in rows_by_name().values() if r.name.rpartition(".")[0] == ".".join(parents)]
            found.append(unknown_key(last, [sibling.rpartition(".")[2] for sibling in siblings], where))
        elif row is None:
            found.append(SpecError(item["msg"], where=where, allowed="a mapping of spec fields"))
        elif item["type"] == "missing":
            found.append(SpecError(f"{name} is missing", where=where, allowed=allowed(row)))
        elif item["type"] == "string_too_long":
            found.append(SpecError(f"{name} has {len(item['input'])} characters", where=where,
                                   allowed=f"at most {row.schema['maxLength']}"))
        else:
            found.append(bad_value(row, item["input"], where, note))
    return found


def bad_value(row: Row, value: object, where: str, note: str = "") -> SpecError:
    return SpecError(f"{row.name} is {show(value)}{note}", where=where,
                     allowed=allowed(row) + (", or null" if row.nullable else ""), nearest=nearest(row, value))


def unknown_key(key: str, known: list[str], where: str) -> SpecError:
    return SpecError(f"unknown key {show(key)}", where=where, allowed=", ".join(known), nearest=closest(key, known))
