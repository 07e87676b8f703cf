"""Grids of benchmark cases: YAML whose lists multiply. The keys, and what each may hold, are the operation's. No torch.
"""
from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flashgen.codegen.dtype import DTYPES
from flashgen.errors import SpecError, nearest_word

ROOT = Path(__file__).resolve().parents[2]


class Axis(NamedTuple):
    """A key of a grid. With `is_list` one choice is a list of numbers, and several are a list of lists."""

    fits: Callable[[Any], bool]
    allowed: str
    is_list: bool = False


COUNT = Axis(lambda value: type(value) is int and value >= 1, "whole numbers from 1")
FLAG = Axis(lambda value: isinstance(value, bool), "true, false")
DTYPE = Axis(lambda value: isinstance(value, str) and value in DTYPES, ", ".join(DTYPES))


def is_inline(grid: str) -> bool:
    """Whether it is YAML text, and not the name of a file."""
    return grid.lstrip().startswith(("{", "["))


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


def combinations(values: object, where: str, axes: Mapping[str, Axis]) -> list[dict[str, Any]]:
    """A mapping of keys to single values for each case of `values`: a mapping, whose lists multiply, or a list of such.
    SpecError names what is wrong at `where`."""
    products: list[Any] = values if isinstance(values, list) else [values]
    if not products or not all(isinstance(product, dict) and product for product in products):
        raise SpecError("is no mapping, and no list of mappings", where=where, allowed=", ".join(axes))
    choices = [{str(key): _choices(key, value, where, axes) for key, value in product.items()} for product in products]
    return [dict(zip(each, one, strict=True)) for each in choices for one in itertools.product(*each.values())]


def _choices(key: object, value: object, where: str, axes: Mapping[str, Axis]) -> Sequence[Any]:
    axis = axes.get(str(key))
    if axis is None:
        raise SpecError(f"unknown key {key}", where=where, allowed=", ".join(axes),
                        nearest=nearest_word(key, axes))
    several = isinstance(value, list) and not (axis.is_list and all(isinstance(item, int) for item in value))
    choices: Sequence[Any] = value if several and isinstance(value, list) else [value]
    for choice in choices:
        if not axis.fits(choice):
            raise SpecError(f"{key} is {choice!r}", where=where, allowed=axis.allowed)
    return choices


def default_grid(family: str, pass_: str) -> str:
    path = ROOT / "benchmarks" / "grids" / f"{family}_{pass_}.yaml"
    if not path.is_file():
        raise SpecError(f"no default grid for {family} {pass_}", where="--problem-grid", next=(
            "give one, such as --problem-grid '{batch: 2, num_heads_q: 16, head_dim_qk: 128, seqlen_q: [2048, 8192]}'"))
    return str(path)
