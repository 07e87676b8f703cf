"""A loaded kernel and its launches. No Jinja, no YAML, no torch."""
from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from flashgen.codegen.plan import Plan, params_layout
from flashgen.codegen.program import Number, Step
from flashgen.errors import EnvironmentError_, PlanError
from flashgen.log import logger
from flashgen.runtime.launch.driver import api, check, device_facts, during_capture
from flashgen.runtime.launch.tensor_map import MAP_ALIGN, MAP_BYTES, encode, map_shapes


class Kernel:
    """A cubin loaded on one device. The context that torch uses there must be current."""

    def __init__(self, plan: Plan, image: bytes, device_index: int) -> None:
        """EnvironmentError_ where the driver refuses the image: it is for another card, or newer than the driver."""
        cuda = api()
        device = check(cuda.cuDeviceGet(device_index), f"cuda:{device_index}")
        smem_attribute = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        with during_capture():
            status, library = cuda.cuLibraryLoadData(image, None, None, 0, None, None, 0)
            if status != cuda.CUresult.CUDA_SUCCESS:
                facts = device_facts(device_index)
                driver_version = check(cuda.cuDriverGetVersion())
                raise EnvironmentError_(
                    f"the driver refuses {plan.kernel_name} ({status.name}) on {facts.name}, compute capability "
                    f"{facts.cc / 10:.1f}, driver for CUDA {driver_version // 1000}.{driver_version % 1000 // 10}",
                    allowed="a cubin of this card's compute capability, from an NVRTC of the driver's CUDA or older",
                    next="flashgen doctor shows both versions")
            self._library = library  # keeps the code loaded
            kernel = check(cuda.cuLibraryGetKernel(library, plan.variant.encode()), plan.kernel_name)
            check(cuda.cuKernelSetAttribute(smem_attribute, plan.launch.smem_bytes, kernel, device), plan.kernel_name)
            # Asking for the function loads the code now; a lazy load at the first launch would break a graph capture.
            self.function = check(cuda.cuKernelGetFunction(kernel), plan.kernel_name)
        self.plan = plan
        self.device_index = device_index
        logger().info("loaded %s on cuda:%d", plan.kernel_name, device_index)

    @property
    def num_sms(self) -> int:
        """Of its device: what a persistent grid is sized for."""
        return device_facts(self.device_index).num_sms

    def launcher(self, step: Step, order: Sequence[str]) -> Launcher:
        return Launcher(self, step, order)


def _picker(plan: Plan, names: Sequence[str], order: Sequence[str]) -> Callable[[list[int]], tuple[int, ...]]:
    """A function that picks the named addresses out of ordered ones, in C where it can. A later one of two equal names
    counts. PlanError for a name that is not among them."""
    places = {name: place for place, name in enumerate(order)}
    if unknown := [name for name in names if name not in places]:
        raise PlanError(f"no call gives it the pointer {unknown[0]}", where=plan.kernel_name, allowed=", ".join(order))
    positions = [places[name] for name in names]
    if len(positions) > 1:
        return itemgetter(*positions)
    return lambda addresses: tuple(addresses[place] for place in positions)


def pack_params(plan: Plan, values: Mapping[str, Number]) -> bytes:
    """The parameter block with null pointers and blank tensor maps. `values`: every other parameter."""
    given: dict[str, Any] = {**values, **dict.fromkeys(plan.pointers, 0)}
    given |= {row.name: bytes(MAP_BYTES) for row in plan.tensor_maps}
    given |= {p.name: divisor_bytes(given[p.name]) for p in plan.params if p.ctype == "divisor"}
    return struct.pack(plan.params_format(), *(given[p.name] for p in plan.params))


def divisor_bytes(value: int) -> bytes:
    """struct Divisor of templates/include/flashgen/divisor.cuh, for value in [0, 2^31); nothing is divided by 0."""
    shift = max(value - 1, 0).bit_length()
    return struct.pack("<iII", value, -(-(1 << 31 + shift) // max(value, 1)), shift)


def _attributes(plan: Plan, step: Step) -> list[Any]:
    """What the driver must know about a launch beside its size."""
    cuda, attributes = api(), []

    def add(name: str, field: str) -> None:
        attribute = cuda.CUlaunchAttribute()
        attribute.id = getattr(cuda.CUlaunchAttributeID, f"CU_LAUNCH_ATTRIBUTE_{name}")
        setattr(attribute.value, field, 1)
        attributes.append(attribute)

    if step.cooperative:
        add("COOPERATIVE", "cooperative")
    if plan.launch.programmatic:  # it waits by griddepcontrol.wait for the kernel before it
        add("PROGRAMMATIC_STREAM_SERIALIZATION", "programmaticStreamSerializationAllowed")
    return attributes


class Launcher:
    """One kernel with all arguments but its pointers fixed. Not for two threads at once: they would share the bytes."""

    def __init__(self, kernel: Kernel, step: Step, order: Sequence[str]) -> None:
        """`order`: the pointers that calls give addresses for; the plan's are among them."""
        plan, config = kernel.plan, api().CUlaunchConfig()
        packed, pointers, offsets = pack_params(plan, step.values), plan.pointers, params_layout(plan.params)[1]
        self._memory = ctypes.create_string_buffer(len(packed) + MAP_ALIGN)
        self._params = -(-ctypes.addressof(self._memory) // MAP_ALIGN) * MAP_ALIGN  # where the block begins
        ctypes.memmove(self._params, packed, len(packed))
        self._arguments = (ctypes.c_void_p * 1)(self._params)
        self._arguments_address = ctypes.addressof(self._arguments)
        self._pack_pointers = functools.partial(  # they lie side by side: plan.verify
            struct.Struct(f"<{len(pointers)}Q").pack_into, self._memory,
            self._params - ctypes.addressof(self._memory) + offsets[pointers[0]])
        config.gridDimX, config.gridDimY, config.gridDimZ = step.grid_x, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = step.threads, 1, 1
        config.sharedMemBytes = plan.launch.smem_bytes
        if attributes := _attributes(plan, step):
            config.attrs, config.numAttrs = attributes, len(attributes)
        self._config, self._kernel, self._function = config, kernel, kernel.function
        self._launch, self._success = api().cuLaunchKernelEx, api().CUresult.CUDA_SUCCESS
        self._stream_type, self._stream = api().CUstream, -1
        self._shapes = [(shape, self._params + offsets[shape.name]) for shape in map_shapes(plan, step.values)]
        self._pick = _picker(plan, pointers, order)
        self._pick_mapped = _picker(plan, [shape.tensor for shape, _ in self._shapes], order)
        self._replace = api().cuTensorMapReplaceAddress
        self._maps: list[Any] = []             # encoded at the first launch, which brings the addresses
        self._addresses: tuple[int, ...] = ()  # that they hold

    def __call__(self, stream: int, addresses: list[int]) -> None:
        """Launch on `stream` (a CUstream as an int). DriverError if it is refused."""
        self._pack_pointers(*self._pick(addresses))
        if self._shapes and (mapped := self._pick_mapped(addresses)) != self._addresses:
            self._map(mapped)
        if stream != self._stream:
            self._config.hStream, self._stream = self._stream_type(stream), stream
        (status,) = self._launch(self._config, self._function, self._arguments_address, 0)
        if status != self._success:
            check((status,), f"launch of {self._kernel.plan.kernel_name}")

    def _map(self, addresses: tuple[int, ...]) -> None:
        """Point the tensor maps, which lie in the parameter block, at tensors that moved since the last launch."""
        if not self._maps:
            self._maps = [encode(shape, address, place)
                          for (shape, place), address in zip(self._shapes, addresses, strict=True)]
        else:
            for i, address in enumerate(addresses):
                if address != self._addresses[i]:
                    (status,) = self._replace(self._maps[i], address)
                    if status != self._success:
                        self._maps, self._addresses = [], ()  # the next launch begins anew
                        check((status,), f"tensor map {self._shapes[i][0].name} of {self._kernel.plan.kernel_name}")
        self._addresses = addresses
