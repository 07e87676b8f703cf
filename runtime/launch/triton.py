"""Kernels in Triton: their text as a Python module, launched on a device or run by Triton's interpreter on the CPU.

Triton reads the source of what it compiles from a file, so the text is placed in the cache's folder, by its content.
Triton compiles at the first launch, and keeps what it compiled in a cache of its own.
"""
from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import sys
import tempfile
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashgen.codegen.dtype import DTYPES
from flashgen.codegen.plan import Plan
from flashgen.codegen.program import Number, Step
from flashgen.codegen.source import Source
from flashgen.errors import CompileError, EnvironmentError_, PlanError
from flashgen.log import logger
from flashgen.runtime.launch.driver import device_facts

if TYPE_CHECKING:
    from torch import Tensor

VARIABLE = "TRITON_INTERPRET"
_TORCH_NAMES = {"f32": "float32", "i32": "int32", "i64": "int64", "bool": "bool"}


class TritonKernel:
    """A kernel of one device, which is torch's current one at every launch."""

    def __init__(self, plan: Plan, image: bytes, device_index: int) -> None:
        """`image`: the text. EnvironmentError_ without Triton, or where it was told to interpret kernels."""
        self.plan, self.device_index = plan, device_index
        self.function = _function(plan, image.decode())
        if _interprets(self.function):
            raise EnvironmentError_(f"{VARIABLE} is set, so Triton interprets kernels and compiles none for cuda:"
                                    f"{device_index}", where=plan.kernel_name, allowed=f"a process without {VARIABLE}",
                                    next=f"env -u {VARIABLE} COMMAND")
        logger().info("loaded %s on cuda:%d", plan.kernel_name, device_index)

    @property
    def num_sms(self) -> int:
        return device_facts(self.device_index).num_sms

    def launcher(self, step: Step, order: Sequence[str]) -> Callable[[int, list[int]], None]:
        """A function of (stream, addresses) that launches the step on the stream, which is torch's current one.
        PlanError for a pointer that is not in `order`, the names of what calls give addresses of."""
        plan = self.plan
        if unknown := [name for name in plan.pointers if name not in order]:
            raise PlanError(f"no call gives it the pointer {unknown[0]}", where=plan.kernel_name,
                            allowed=", ".join(order))
        dtypes, optional = _dtypes(plan), _optional(plan)
        places = [(order.index(name), dtypes[name], name in optional) for name in plan.pointers]
        values, options = _values(plan, step.values), _options(plan)
        run = self.function[(step.grid_x,)]

        def launch(stream: int, addresses: list[int]) -> None:
            try:
                run(*[None if optional and not addresses[place] else Pointer(addresses[place], dtype)
                      for place, dtype, optional in places], *values, **options)
            except Exception as error:  # of Triton's compiler, which has many
                raise _refused(plan, error) from error
        return launch


class Pointer:
    """An address of a device as Triton takes tensors. It looks at whether 16 divides it."""

    __slots__ = ("address", "dtype")

    def __init__(self, address: int, dtype: Any) -> None:
        self.address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        return self.address


class InterpretedKernel:
    """A kernel on the CPU, by Triton's interpreter."""

    num_sms = 1  # grids do not depend on it

    def __init__(self, plan: Plan, source: Source) -> None:
        """EnvironmentError_ without Triton, and where this process does not interpret its kernels."""
        if os.environ.get(VARIABLE) != "1":
            raise EnvironmentError_("kernels of Triton run on the CPU in its interpreter, which has to be asked for",
                                    where=plan.kernel_name, allowed=f"{VARIABLE}=1, before Triton is imported",
                                    next=f"{VARIABLE}=1 COMMAND, such as flashgen verify SPEC --emulate")
        self.plan, self.function = plan, _function(plan, source.text)
        # What was decorated while the variable was not set, as Triton's own functions, stays as it is.
        if not (_interprets(self.function) and _interprets(importlib.import_module("triton.language").cdiv)):
            raise EnvironmentError_(f"Triton was imported before {VARIABLE} was set", where=plan.kernel_name,
                                    allowed=f"{VARIABLE}=1 in the environment of the process",
                                    next=f"{VARIABLE}=1 COMMAND")

    def launcher(self, step: Step) -> Callable[..., None]:
        """A function of the tensors by name; None or none is a null pointer."""
        values, options, optional = _values(self.plan, step.values), _options(self.plan), _optional(self.plan)
        function, first = self.function, {}
        if hasattr(function, "configs"):  # an autotuner, which would time kernels: any of its tiles is right
            function, first = function.fn, function.configs[0].kwargs

        def launch(tensors: Mapping[str, Tensor | None], filled: Collection[str] = ()) -> None:
            # Of no elements data_ptr() is null.
            given = [None if name in optional and (t is None or not t.numel()) else t
                     for name in self.plan.pointers for t in (tensors.get(name),)]
            wide = [_widened(t) for t in given]
            function[(step.grid_x,)](*wide, *values, **options, **first)
            for t, computed in zip(given, wide, strict=True):
                if t is not None and computed is not None and t is not computed:
                    t.copy_(computed)
        return launch


def _widened(t: Tensor | None) -> Tensor | None:
    """A bf16 tensor in fp32, of the same strides: the interpreter multiplies bf16 wrongly. Others as they are."""
    import torch

    if t is None or t.dtype != torch.bfloat16 or not t.numel():
        return t
    elements = 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return t.as_strided((elements,), (1,)).float().as_strided(t.shape, t.stride(), 0)


def _dtypes(plan: Plan) -> dict[str, Any]:
    """torch's dtypes of what pointers point at, by name."""
    import torch

    element = DTYPES[str(plan.spec_value("dtype"))].torch_name
    names = {p.name: _TORCH_NAMES.get(p.ctype.rpartition("_")[0], element) for p in plan.params}
    return {name: getattr(torch, names[name]) for name in plan.pointers}


def _refused(plan: Plan, error: Exception) -> Exception:
    """An error of Triton's as one of ours; others as they are."""
    if not type(error).__module__.startswith("triton"):
        return error
    what = (str(error).splitlines() or [""])[0]
    return CompileError(f"Triton does not compile it: {type(error).__name__}: {what}", where=plan.kernel_name,
                        nearest="a smaller tile, fewer stages", details=str(error),
                        next="flashgen tune SPEC --variant NAME tries tiles")


def _optional(plan: Plan) -> set[str]:
    """Pointers for which None is compiled in, where they are null."""
    return {p.name for p in plan.params if p.may_be_null}


def _values(plan: Plan, values: Mapping[str, Number]) -> list[Number]:
    """Arguments behind the pointers, in their order."""
    return [float(values[p.name]) if p.ctype == "f32" else int(values[p.name]) for p in plan.params
            if p.name not in plan.pointers]


def _options(plan: Plan) -> dict[str, int]:
    """What Triton is told of a launch, unless it tries several tiles."""
    return {} if plan.tried else {"num_warps": plan.constant("NUM_WARPS"), "num_stages": plan.constant("NUM_STAGES")}


def _interprets(function: Any) -> bool:
    return type(getattr(function, "fn", function)).__name__ == "InterpretedFunction" or (
        type(function).__name__ == "InterpretedFunction")


def _function(plan: Plan, text: str) -> Any:
    """The kernel of a text, jitted. EnvironmentError_ without Triton."""
    if importlib.util.find_spec("triton") is None:
        raise EnvironmentError_("Triton is not installed", where=plan.kernel_name,
                                allowed="triton 3.4 or newer, which comes with torch for GPUs",
                                next='pip install "flashgen[triton]"')
    return getattr(_module(text), plan.variant)


@functools.cache
def _module(text: str) -> types.ModuleType:
    key = hashlib.sha256(text.encode()).hexdigest()
    path = _placed(key, text)
    module = types.ModuleType(f"flashgen_triton_{key[:16]}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # where inspect looks for what the file defines
    exec(compile(text, str(path), "exec"), module.__dict__)
    return module


def _placed(key: str, text: str) -> Path:
    """A file that holds the text: in the cache's folder, or where that cannot be, in one of this process."""
    from flashgen.runtime.select.lookup import default_cache

    directory = default_cache().directory
    path = (directory / "triton" if directory else _own_folder()) / f"{key}.py"
    try:
        if path.read_text(encoding="utf-8") == text:
            return path
    except OSError:
        pass
    path.parent.mkdir(mode=0o700, exist_ok=True)
    handle, part = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(part, path)
    return path


@functools.cache
def _own_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="flashgen-triton-"))
