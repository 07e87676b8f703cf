"""Every function of the PTX drawer on the GPU against its numpy model. Needs compute capability 9.0."""
from __future__ import annotations

import ctypes
import multiprocessing
import struct
import zlib
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from drawer_case import Arrays, Case, TensorMapSpec
from drawer_kernels import CASES

from flashgen.runtime.launch.driver import adopt_context, api, check

pytestmark = pytest.mark.gpu


def encode(spec: TensorMapSpec, address: int) -> bytes:
    """The 128 bytes of the tensor map over the buffer at a device address."""
    cuda = api()
    element = {"u8": "UINT8", "bf16": "BFLOAT16", "f32": "FLOAT32"}[spec.element]
    swizzle = f"{spec.swizzle}B" if spec.swizzle else "NONE"
    strides = spec.strides or (16,)  # one dimension has none, but the list must not become a null pointer
    tensor_map = check(cuda.cuTensorMapEncodeTiled(
        getattr(cuda.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{element}"), len(spec.dims), address,
        [cuda.cuuint64_t(dim) for dim in spec.dims], [cuda.cuuint64_t(stride) for stride in strides],
        [cuda.cuuint32_t(size) for size in spec.box], [cuda.cuuint32_t(1)] * len(spec.dims),
        cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(cuda.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{swizzle}"),
        cuda.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
        cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE), f"map of {spec}")
    return ctypes.string_at(tensor_map.getPtr(), 128)


def launch_config(case: Case) -> Any:
    cuda = api()
    config = cuda.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = case.blocks, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = case.threads, 1, 1
    config.sharedMemBytes = case.smem
    config.hStream = cuda.CUstream(torch.cuda.current_stream().cuda_stream)
    attributes = []
    if case.cluster > 1:
        attributes.append(cuda.CUlaunchAttribute())
        attributes[-1].id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        dims = attributes[-1].value.clusterDim
        dims.x, dims.y, dims.z = case.cluster, 1, 1
    if case.launches > 1:
        attributes.append(cuda.CUlaunchAttribute())
        attributes[-1].id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attributes[-1].value.programmaticStreamSerializationAllowed = 1
    if attributes:
        config.attrs, config.numAttrs = attributes, len(attributes)
    return config


def run(case: Case, inputs: Arrays) -> Arrays:
    """All buffers after the kernel."""
    cuda = api()
    buffers = {name: torch.from_numpy(inputs[name].reshape(-1).view(np.uint8).copy()).cuda() for name in case.pointers}
    params = b"".join(encode(spec, buffers[spec.buffer].data_ptr()) for spec in case.maps.values())
    params += struct.pack(f"<{len(buffers)}Q", *(buffer.data_ptr() for buffer in buffers.values()))
    memory = ctypes.create_string_buffer(params, len(params))
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(memory))
    module = check(cuda.cuModuleLoadData(case.compile().image), case.name)
    function = check(cuda.cuModuleGetFunction(module, case.entry.encode()), case.name)
    check(cuda.cuFuncSetAttribute(
        function, cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, case.smem), case.name)
    config = launch_config(case)
    for _ in range(case.launches):
        check(cuda.cuLaunchKernelEx(config, function, ctypes.addressof(arguments), 0), case.name)
    torch.cuda.synchronize()
    check(cuda.cuModuleUnload(module), case.name)
    return {name: buffer.cpu().numpy().view(inputs[name].dtype).reshape(inputs[name].shape)
            for name, buffer in buffers.items()}


class _Child:
    """A process that runs cases. A CUDA error ends its context for good, so the next case gets a new one."""

    pool: ProcessPoolExecutor | None = None

    def __call__(self, name: str, inputs: Arrays) -> Arrays:
        if self.pool is None:
            self.pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        try:
            return self.pool.submit(_run_named, name, inputs).result()
        except Exception:
            self.pool.shutdown()
            self.pool = None
            raise


_child = _Child()


def _run_named(name: str, inputs: Arrays) -> Arrays:
    adopt_context(0)
    return run(CASES[name], inputs)


@pytest.mark.time_limit(60)
@pytest.mark.parametrize("name", CASES)
def test_drawer(name: str, cuda: str) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("compute capability 9.0 only")
    case = CASES[name]
    inputs = case.inputs(np.random.default_rng(zlib.crc32(name.encode())))
    found = _child(name, inputs)
    constants = {key: inputs[key] for key, c_type in case.pointers.items() if c_type.startswith("const ")}
    faults = case.compare({**case.model(inputs), **constants}, found)
    assert not faults, "\n".join(faults)


def inputs_at(name: str, coords: tuple[int, ...]) -> Arrays:
    """The case's inputs with every box at `coords`, so that no other coordinate can be what traps."""
    inputs = CASES[name].inputs(np.random.default_rng(0))
    inputs["coords"][:] = coords
    return inputs


@pytest.mark.time_limit(60)
@pytest.mark.parametrize("name, coords", [
    ("tma_store_1d", (-12,)), ("tma_store_2d", (-16, 0)), ("tma_store_2d", (0, -3)), ("tma_store_2d", (0, -16)),
    ("tma_store_5d", (0, 0, 0, 0, -1)), ("tma_reduce_add_1d", (-4,)), ("tma_reduce_add_3d", (0, 0, -1))])
def test_a_tensor_store_or_sum_at_a_negative_coordinate_traps(name: str, coords: tuple[int, ...], cuda: str) -> None:
    """Why the emulator refuses one, while a load of such a box gives zeros."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("compute capability 9.0 only")
    with pytest.raises(Exception, match="illegal instruction"):
        _child(name, inputs_at(name, coords))


@pytest.mark.time_limit(60)
@pytest.mark.parametrize("name, coords", [
    ("tma_store_1d", (100,)), ("tma_store_2d", (72, 0)), ("tma_store_2d", (0, 20)), ("tma_store_3d", (0, 9, 0)),
    ("tma_reduce_add_1d", (100,)), ("tma_reduce_add_2d", (72, 0)), ("tma_reduce_add_3d", (0, 9, 0))])
def test_a_tensor_store_or_sum_past_the_end_writes_nothing(name: str, coords: tuple[int, ...], cuda: str) -> None:
    """The gap after each row and the next plane are in the buffer, so that a store past the row's end would be seen."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("compute capability 9.0 only")
    inputs = inputs_at(name, coords)
    assert any(c >= dim for c, dim in zip(coords, CASES[name].maps["map"].dims, strict=True))
    faults = CASES[name].compare(inputs, _child(name, inputs))
    assert not faults, "\n".join(faults)
