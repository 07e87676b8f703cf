"""What `flashgen bench` measures: cases, the grids that list them, and the variants that serve them. No torch."""
from __future__ import annotations

import difflib
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashgen.codegen.dtype import DTYPES
from flashgen.codegen.families.fa3.launch import cutting_of
from flashgen.codegen.families.fa3.split import Shape, best_twin
from flashgen.codegen.families.registry import lower
from flashgen.codegen.mask import visible_pairs
from flashgen.errors import SpecError, UnsupportedError

if TYPE_CHECKING:
    from flashgen.codegen.spec.spec import Spec

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Case:
    """One problem. `window` as in the API; causal is bottom-right aligned. Varlen: lengths are tuples of `batch`."""

    batch: int
    seqlen_q: int | tuple[int, ...]
    seqlen_kv: int | tuple[int, ...]
    num_heads_q: int
    num_heads_kv: int
    head_dim_qk: int
    head_dim_v: int
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    dtype: str = "bf16"

    @property
    def varlen(self) -> bool:
        return isinstance(self.seqlen_q, tuple)

    @property
    def lengths(self) -> tuple[tuple[int, int], ...]:
        """(queries, keys) of each sequence."""
        if isinstance(self.seqlen_q, tuple) and isinstance(self.seqlen_kv, tuple):
            return tuple(zip(self.seqlen_q, self.seqlen_kv, strict=True))
        return ((self.seqlen_q, self.seqlen_kv),) * self.batch  # type: ignore[return-value]

    @property
    def visible(self) -> tuple[int, int]:
        """The window with what causal adds to it."""
        left, right = self.window
        return left, 0 if self.causal else right

    @property
    def head_dims(self) -> str:
        """As in `D128` or `D192/128`."""
        return f"D{_pair(self.head_dim_qk, self.head_dim_v)}"

    @property
    def shape(self) -> str:
        """As in `H32/8 B8 S2048`; varlen, `H16 B3 S1-16384`: the shortest and the longest sequence."""
        sides = [f"{min(side)}-{max(side)}" if isinstance(side, tuple) else str(side)
                 for side in (self.seqlen_q, self.seqlen_kv)]
        return f"H{_pair(self.num_heads_q, self.num_heads_kv)} B{self.batch} S{_pair(*sides)}"

    @property
    def label(self) -> str:
        """As in `D128 H16 B2 S8192 causal`."""
        words = [self.head_dims, self.shape, *(["varlen"] if self.varlen else []),
                 "causal" if self.causal else "full",
                 *(["window {},{}".format(*self.window)] if self.window != (-1, -1) else []),
                 *([self.dtype] if self.dtype != "bf16" else [])]
        return " ".join(words)

    @property
    def flops(self) -> int:
        """Of the (query, key) pairs that the mask leaves; a multiply-add counts as two."""
        pairs = sum(count * visible_pairs(*sides, self.visible) for sides, count in Counter(self.lengths).items())
        return 2 * self.num_heads_q * pairs * (self.head_dim_qk + self.head_dim_v)

    @property
    def bytes(self) -> int:
        """q, k, v and out once each."""
        rows = sum(queries * self.num_heads_q + keys * self.num_heads_kv for queries, keys in self.lengths)
        return rows * (self.head_dim_qk + self.head_dim_v) * DTYPES[self.dtype].bytes


def _pair(a: object, b: object) -> str:
    return f"{a}" if a == b else f"{a}/{b}"


# -- grids

_KEYS = ("batch", "tokens", "seqlen_q", "seqlen_kv", "lengths", "num_heads_q", "num_heads_kv", "hidden", "head_dim_qk",
         "head_dim_v", "causal", "window", "dtype")
_DENSE_KEYS = ("batch", "tokens", "seqlen_q", "seqlen_kv")
_LISTS = {"window": "[left, right], counts of keys or -1", "lengths": "lists of lengths from 0, one of them above"}


def is_inline(grid: str) -> bool:
    """Whether it is YAML text, and not the name of a file."""
    return grid.lstrip().startswith(("{", "["))


def load_grid(grid: str) -> tuple[Case, ...]:
    """Cases of a YAML file, or of YAML text that begins with `{` or `[`. SpecError says what is wrong.

    A mapping, whose lists multiply, or a list of such. `tokens` gives batch = tokens / seqlen_q, `hidden` gives
    num_heads_q = hidden / head_dim_qk; seqlen_kv, num_heads_kv and head_dim_v follow their twins unless given;
    `window` is a pair or a list of pairs. `lengths`, a list or a list of lists, makes a varlen case: of its sequences,
    each with as many keys as queries, in place of batch and seqlen.
    """
    values, where = read_grid(grid)
    return cases_of(values if isinstance(values, list) else [values], where)


def combinations(grid: str, keys: Sequence[str]) -> tuple[str, list[dict[str, Any]]]:
    """(where it is written, a mapping of `keys` to single values for each case) of a grid. SpecError as load_grid."""
    values, where = read_grid(grid)
    return where, _combined(values if isinstance(values, list) else [values], where, keys)


def read_grid(grid: str) -> tuple[object, str]:
    """(what the YAML says, where that is). SpecError where it cannot be read or is no YAML."""
    import yaml

    from flashgen.codegen.spec.yaml_tree import read_text

    where = "--problem-grid" if is_inline(grid) else grid
    try:
        return yaml.safe_load(grid if is_inline(grid) else read_text(Path(grid))), where
    except FileNotFoundError as err:
        raise SpecError("no such file", where=where, allowed="a YAML file, or {key: value, ...}",
                        next="benchmarks/grids holds examples") from err
    except (yaml.YAMLError, RecursionError, ValueError) as err:  # a date such as 2024-99-99 is a ValueError
        raise SpecError(f"is not YAML: {str(err) or type(err).__name__}", where=where) from err


def cases_of(products: Sequence[object], where: str) -> tuple[Case, ...]:
    """Each once."""
    return tuple(dict.fromkeys(_case(one, where) for one in _combined(products, where, _KEYS)))


def _combined(products: Sequence[object], where: str, keys: Sequence[str]) -> list[dict[str, Any]]:
    if not products or not all(isinstance(product, dict) and product for product in products):
        raise SpecError("is no mapping, and no list of mappings", where=where, allowed=", ".join(keys))
    axes = [{str(key): _choices(key, value, where, keys) for key, value in product.items()}  # type: ignore[attr-defined]
            for product in products]
    return [dict(zip(each, one, strict=True)) for each in axes for one in itertools.product(*each.values())]


def _choices(key: object, value: object, where: str, keys: Sequence[str]) -> list[Any]:
    if key not in keys:
        raise SpecError(f"unknown key {key}", where=where, allowed=", ".join(keys),
                        nearest=next(iter(difflib.get_close_matches(str(key), keys, n=1)), ""))
    one = not isinstance(value, list) or (key in _LISTS and all(isinstance(item, int) for item in value))
    choices: list[Any] = [value] if one else value  # type: ignore[assignment]
    for choice in choices:
        if key in _LISTS:
            least = -1 if key == "window" else 0
            fine = (isinstance(choice, list) and all(type(item) is int and item >= least for item in choice)
                    and (len(choice) == 2 if key == "window" else sum(choice) > 0))
            allowed = _LISTS[str(key)]
        elif key == "causal":
            fine, allowed = isinstance(choice, bool), "true, false"
        elif key == "dtype":
            fine, allowed = choice in DTYPES, ", ".join(DTYPES)
        else:
            fine, allowed = type(choice) is int and choice >= 1, "whole numbers from 1"
        if not fine:
            raise SpecError(f"{key} is {choice!r}", where=where, allowed=allowed)
    return choices


def _case(values: dict[str, Any], where: str) -> Case:
    if "lengths" in values:
        if both := [name for name in _DENSE_KEYS if name in values]:
            raise SpecError(f"gives both lengths and {both[0]}", where=where, allowed="one of the two")
        lengths = tuple(values.pop("lengths"))
        values |= {"batch": len(lengths), "seqlen_q": lengths, "seqlen_kv": lengths}
    for total, part, name in (("tokens", "seqlen_q", "batch"), ("hidden", "head_dim_qk", "num_heads_q")):
        if part not in values:
            raise SpecError(f"{part} is missing", where=where, allowed="whole numbers from 1")
        if (total in values) == (name in values):
            raise SpecError(f"gives {'both' if total in values else 'neither of'} {name} and {total}", where=where,
                            allowed="one of the two")
        if total in values:
            whole = values.pop(total)
            if whole % values[part]:
                raise SpecError(f"{total} {whole} is not a multiple of {part} {values[part]}", where=where,
                                allowed=f"{name} = {total} / {part} in whole numbers")
            values[name] = whole // values[part]
    for name, twin in (("seqlen_kv", "seqlen_q"), ("num_heads_kv", "num_heads_q"), ("head_dim_v", "head_dim_qk")):
        values.setdefault(name, values[twin])
    if values["num_heads_q"] % values["num_heads_kv"]:
        raise SpecError(f"num_heads_q {values['num_heads_q']} is not a multiple of num_heads_kv "
                        f"{values['num_heads_kv']}", where=where)
    if "window" in values:
        values["window"] = tuple(values["window"])
    return Case(**values)


def default_grid(family: str, pass_: str) -> str:
    path = ROOT / "benchmarks" / "grids" / f"{family}_{pass_}.yaml"
    if not path.is_file():
        raise SpecError(f"no default grid for {family} {pass_}", where="--problem-grid", next=(
            "give one, such as --problem-grid '{batch: 2, num_heads_q: 16, head_dim_qk: 128, seqlen_q: [2048, 8192]}'"))
    return str(path)


def variants_for(case: Case, specs: Iterable[Spec], archs: Sequence[str], num_sms: int) -> list[Spec]:
    """The variants that serve a case, for the first of `archs` that has any.

    Of those that differ in `split` and `pack_gqa` only, the one that a call on a device with `num_sms` SMs gets.
    """
    windowed, layout = case.window != (-1, -1), "varlen" if case.varlen else "dense"
    fitting = [spec for spec in specs if spec.kv_layout == layout and spec.dtype == case.dtype
               and (spec.head_dim_qk, spec.head_dim_v) == (case.head_dim_qk, case.head_dim_v)
               and (spec.window if windowed else not spec.window and spec.causal == case.causal)]
    for arch in archs:
        found = [spec for spec in fitting if spec.arch == arch]
        twins: dict[Spec, list[Spec]] = {}
        for spec in found:
            twins.setdefault(spec.with_(split=False, pack_gqa=False), []).append(spec)
        if found:
            return [_best(specs, case, num_sms) for specs in twins.values()]
    raise UnsupportedError(f"no variant serves {case.label}", where="bench", allowed=", ".join(archs) + f", {layout}",
                           next="flashgen list SPEC; or narrow the grid")


def _best(twins: Sequence[Spec], case: Case, num_sms: int) -> Spec:
    """As Registry.for_sizes."""
    if len(twins) == 1:
        return twins[0]
    (rows_q, rows_kv), = set(case.lengths)  # only dense ones have twins
    whole, cut, packed = (cutting_of(lower(twins[0].with_(split=cuts, pack_gqa=packs)))
                          for cuts, packs in ((False, False), (True, False), (True, True)))  # all, if not twins
    splits, packs = best_twin((whole, cut, packed), num_sms,
                              Shape(case.batch, rows_q, rows_kv, case.num_heads_q, case.num_heads_kv))
    return max(twins, key=lambda spec: (spec.pack_gqa == bool(packs), spec.split == splits))
