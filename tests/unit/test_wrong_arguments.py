"""Arguments of any kind to every public function: what comes out is a result or an error of flashgen's own."""
from __future__ import annotations

import enum
import inspect
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flashgen
from flashgen.compat import flash_mla
from flashgen.errors import FlashgenError


class Raises:
    """An object of a class whose every answer is an error."""

    def _raise(self, *_: object) -> Any:
        raise RuntimeError("no answer")

    __eq__ = __hash__ = __bool__ = __len__ = __iter__ = __index__ = __float__ = __repr__ = __str__ = _raise


class Number(enum.IntEnum):
    THREE = 3


WRONG: tuple[Callable[[], Any], ...] = (*(lambda value=value: value for value in (  # type: ignore[misc]
    None, True, 0, 1, -1, 2, 10**30, -10**400, 10**5000, 0.5, 1.5, 3.0, float("nan"), float("inf"), 1e-46, 1e300, "",
    "x", "top_left", "0.5", "\0", "\ud800", "x" * 5000, b"", b"ab", (), (1,), (1.5, 0), (1, 2, 3), ([], {}), object(),
    int, len, 1 + 2j, 1 + 0j, Number.THREE, Fraction(1, 3), Fraction(10**400), Decimal("0.5"), Decimal("NaN"),
    Decimal("sNaN"), np.int64(3), np.float32(0.5), np.float64("nan"), np.bool_(True), np.longdouble(2),
    np.str_("x"), np.datetime64("2020-01-01"), torch.bfloat16, torch.device("cpu"), Path("/nonexistent"), Raises(),
    range(3), flashgen.MlaSchedule(1, 2, 3, 4), flashgen.variant("score * 2.0"))),  # type: ignore[arg-type]
    list, dict, set, lambda: [1], lambda: [3, 0], lambda: [0, 1.5], lambda: {"a": 1}, lambda: {1: 2}, lambda: [[]] * 3,
    lambda: np.array(3), lambda: np.array([3, 0]), lambda: np.array("x"), lambda: np.zeros((2, 2)),
    lambda: np.array([None, object()]),
    lambda: torch.tensor(3), lambda: torch.tensor(0.5), lambda: torch.tensor([3, 0]),
    lambda: torch.tensor(1j), lambda: torch.zeros(0), lambda: torch.zeros(2, 3), lambda: torch.zeros(1, 2, 1, 8),
    lambda: torch.zeros(1, 2, 1, 8).to_sparse(), lambda: torch.zeros(1, 2, 1, 8, device="meta").bfloat16(),
    lambda: torch.zeros((), device="meta"), lambda: torch.tensor([0, 1], dtype=torch.int32).to_sparse(),
    lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
    lambda: torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8),
    lambda: torch.nn.Parameter(torch.zeros(2, 3)), lambda: torch.zeros(2, 3, dtype=torch.complex64))

NO_QUERIES = {"q": torch.zeros(1, 0, 2, 8).bfloat16(), "k": torch.zeros(1, 3, 1, 8).bfloat16(),
              "v": torch.zeros(1, 3, 1, 8).bfloat16()}  # so that every check runs, and no kernel
NO_TOKENS = {"q": torch.zeros(2, 0, 4, 576).bfloat16(), "kv_cache": torch.zeros(2, 64, 576).bfloat16(),
             "seqlens_kv": torch.tensor([3, 4], dtype=torch.int32)}
SPEC = {"name": "x", "family": "fa2", "pass_": "fwd", "arch": "sm_90", "dtype": "bf16", "head_dim_qk": 64}
SIZES = ("batch", "seqlen_q", "seqlen_kv", "num_heads_q", "num_heads_kv", "window", "page_size", "nosuch")

pytestmark = pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning", "ignore:.*quantize:UserWarning")
# Of each function: arguments that are right, and the names of those that its signature gathers.
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any], tuple[str, ...]]] = {
    "MlaSchedule": (flashgen.MlaSchedule, {"rows": torch.zeros(1, 8), "batch": 1, "num_heads_q": 1, "seqlen_q": 1}, ()),
    "Spec": (flashgen.Spec, SPEC, tuple(flashgen.Spec.model_fields)),
    "attention": (flashgen.attention, NO_QUERIES, ()),
    "attention_backward": (flashgen.attention_backward, {
        **NO_QUERIES, "dout": NO_QUERIES["q"], "out": NO_QUERIES["q"], "lse": torch.zeros(1, 2, 0)}, ()),
    "block_map": (flashgen.block_map, {"kv_num_blocks": torch.tensor([1, 1]), "kv_indices": torch.tensor([[0], [1]]),
                                       "shape": (2, 2)}, ()),
    "dropout_mask": (flashgen.dropout_mask, {"seed": torch.tensor([3, 4]), "dropout_p": 0.5, "num_heads": 2,
                                             "seqlen_q": 3, "seqlen_kv": 5}, ()),
    "explain": (flashgen.explain, {"spec": flashgen.Spec(**SPEC)}, SIZES),
    "load_bundle": (flashgen.load_bundle, {"directory": "/nonexistent"}, ()),
    "load_specs": (flashgen.load_specs, {"path": "fa2_fwd"}, ()),
    "mla_decode": (flashgen.mla_decode, NO_TOKENS, ()),
    "mla_schedule": (flashgen.mla_schedule, {"seqlens_kv": torch.zeros(0, dtype=torch.int32), "num_heads_q": 4}, ()),
    "reload": (flashgen.reload, {}, ()),
    "unpack_bits": (flashgen.unpack_bits, {"packed": torch.tensor([5], dtype=torch.uint8), "columns": 3}, ()),
    "variant": (flashgen.variant, {}, tuple(flashgen.Spec.model_fields)),
    "get_mla_metadata": (flash_mla.get_mla_metadata, {}, ()),
    "flash_mla_with_kvcache": (flash_mla.flash_mla_with_kvcache, {
        "q": torch.zeros(0, 1, 4, 576).bfloat16(), "k_cache": torch.zeros(4, 64, 1, 576).bfloat16(), "head_dim_v": 512,
        "block_table": torch.zeros(0, 1, dtype=torch.int32), "cache_seqlens": torch.zeros(0, dtype=torch.int32),
        "tile_scheduler_metadata": flash_mla.FlashMLASchedMeta()}, ()),
}


def parameters(function: Callable[..., Any], gathered: tuple[str, ...]) -> list[str]:
    known = inspect.signature(function).parameters.values()
    named = [p.name for p in known if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    any_name = [p.name for p in known if p.kind is p.VAR_KEYWORD and not gathered]
    return sorted({*named, *gathered, *any_name})


def test_every_public_function_is_drawn() -> None:
    compat = {name for name, value in vars(flash_mla).items()
              if inspect.isfunction(value) and value.__module__ == flash_mla.__name__ and name[0] != "_"}
    assert set(CALLS) == {name for name in flashgen.__all__ if callable(getattr(flashgen, name))} | compat


@pytest.mark.parametrize("name", CALLS)
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_wrong_arguments(name: str, data: st.DataObject) -> None:
    """B131, B132, B133."""
    function, right, gathered = CALLS[name]
    names = st.sampled_from(parameters(function, gathered) or [""])
    wrong = data.draw(st.dictionaries(names, st.sampled_from(range(len(WRONG))), max_size=3))
    wrong.pop("", None)  # of a function without parameters
    arguments = {**right, **{key: WRONG[choice]() for key, choice in wrong.items()}}
    try:
        function(**arguments)
    except FlashgenError as error:
        str(error).encode()  # printable, whatever was given


@pytest.mark.parametrize("name", CALLS)
def test_each_argument_alone(name: str) -> None:
    """B131, B132, B133: each wrong value once for each argument."""
    function, right, gathered = CALLS[name]
    for key in parameters(function, gathered):
        for make in WRONG:
            try:
                function(**{**right, key: make()})
            except FlashgenError as error:
                str(error).encode()
