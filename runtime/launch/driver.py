"""The CUDA driver through cuda.bindings: checked calls, and the few facts of a device that a launch needs."""
from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, cast

from flashgen.errors import DriverError, EnvironmentError_

_used_before_fork = False


def _in_child() -> None:
    global _used_before_fork
    _used_before_fork = _used_before_fork or api.cache_info().currsize > 0
    api.cache_clear()


os.register_at_fork(after_in_child=_in_child)


@functools.cache
def api() -> ModuleType:
    """cuda.bindings.driver, initialised. EnvironmentError_ says what the machine lacks, or that a fork has no CUDA."""
    if _used_before_fork:
        raise EnvironmentError_("this process was forked after CUDA was used, and no CUDA context survives a fork",
                                allowed="CUDA in the process that first used it, or in one that shares nothing with it",
                                next='multiprocessing.get_context("spawn"), or fork before the first call')
    try:
        from cuda.bindings import driver
    except ImportError as err:
        raise EnvironmentError_(f"cuda-bindings cannot be imported: {err}",
                                next='pip install "cuda-bindings>=12.9.4,<14"') from err
    try:
        (status,) = driver.cuInit(0)
    except Exception as err:  # which one depends on the version of the bindings
        raise EnvironmentError_(f"the CUDA driver cannot be loaded: {err}", allowed="a machine with an NVIDIA driver",
                                next="flashgen doctor; flashgen build and explain need none") from err
    if status != driver.CUresult.CUDA_SUCCESS:
        raise EnvironmentError_(f"the CUDA driver does not start: {status.name}", next="flashgen doctor")
    return cast(ModuleType, driver)


def check(result: tuple[Any, ...], doing: str = "") -> Any:
    """The values of a bindings call; DriverError naming the status if it failed."""
    status, *values = result
    if status != api().CUresult.CUDA_SUCCESS:
        _, text = api().cuGetErrorString(status)
        raise DriverError(f"{status.name}: {text.decode() if text else 'unknown'}", where=doing, next="flashgen doctor")
    return values[0] if len(values) == 1 else tuple(values)


def need_device(purpose: str, nearest: str) -> None:
    """EnvironmentError_ unless the driver starts and has a device; `purpose` begins its text.

    Commands ask this before they import torch, which takes seconds.
    """
    if os.path.exists("/dev/kfd"):  # ROCm's: torch will say what there is
        return
    try:
        trouble = "" if check(api().cuDeviceGetCount()) else "the driver sees none"
    except EnvironmentError_ as err:
        trouble = err.what
    if trouble:
        raise EnvironmentError_(f"{purpose}, and there is no CUDA device: {trouble}", nearest=nearest,
                                allowed="a CUDA device with its driver", next="flashgen doctor")


@dataclass(frozen=True)
class DeviceFacts:
    index: int
    name: str
    cc: int  # 10 * major + minor; as Target.cc
    num_sms: int


def of_another_vendor() -> bool:
    """Whether what torch calls CUDA is another vendor's: then there is no CUDA driver, and torch alone is asked."""
    torch = sys.modules.get("torch")
    return torch is not None and getattr(torch.version, "hip", None) is not None


def _facts_by_torch(index: int) -> DeviceFacts:
    """Of a device of ROCm, whose number is that of its target: 942 of gfx942:sramecc+:xnack-."""
    properties = sys.modules["torch"].cuda.get_device_properties(index)
    name = properties.gcnArchName.partition(":")[0].removeprefix("gfx")
    return DeviceFacts(index, properties.name, int(name) if name.isdigit() else 0, properties.multi_processor_count)


@functools.cache
def device_facts(index: int) -> DeviceFacts:
    """Facts of the device that torch calls cuda:<index>."""
    if of_another_vendor():
        return _facts_by_torch(index)
    cuda, attributes = api(), api().CUdevice_attribute
    device = check(cuda.cuDeviceGet(index), f"cuda:{index}")

    def attribute(name: str) -> int:
        return int(check(cuda.cuDeviceGetAttribute(getattr(attributes, f"CU_DEVICE_ATTRIBUTE_{name}"), device)))

    name = check(cuda.cuDeviceGetName(128, device)).split(b"\0")[0].decode()
    cc = 10 * attribute("COMPUTE_CAPABILITY_MAJOR") + attribute("COMPUTE_CAPABILITY_MINOR")
    return DeviceFacts(index, name, cc, attribute("MULTIPROCESSOR_COUNT"))


def adopt_context(index: int) -> None:
    """Gives this thread torch's context of cuda:<index>, the primary one, unless it has a context.

    torch binds a thread with the first call that needs the device, and asking for a stream is none. On a thread of
    autograd, a launch of ours can come before any of torch's.
    """
    if of_another_vendor():
        return
    cuda = api()
    if not int(check(cuda.cuCtxGetCurrent())):
        device = check(cuda.cuDeviceGet(index), f"cuda:{index}")
        check(cuda.cuCtxSetCurrent(check(cuda.cuDevicePrimaryCtxRetain(device), f"the context of cuda:{index}")))


@contextmanager
def during_capture() -> Iterator[None]:
    """Lets this thread load a module while one of its streams is being captured into a CUDA graph."""
    cuda = api()
    mode = check(cuda.cuThreadExchangeStreamCaptureMode(cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
    try:
        yield
    finally:
        check(cuda.cuThreadExchangeStreamCaptureMode(mode))
