"""The PTX drawer without a GPU: its conformance kernels compile, their models agree with independent formulas."""
from __future__ import annotations

import dataclasses
import re
from itertools import pairwise

import drawer_model as ptx
import drawer_products as products
import numpy as np
import pytest
import torch
from drawer_case import TensorMapSpec
from drawer_copies import BY_RANK, BY_SWIZZLE
from drawer_kernels import CASES

from flashgen.codegen.render import TEMPLATES, header_text
from flashgen.codegen.wgmma import MAJORS, PTX_TYPES, WgmmaShape, product_shapes, render_wgmma
from flashgen.errors import CompileError, PlanError

DRAWER = TEMPLATES / "include" / "flashgen" / "ptx"
MODES = pytest.mark.parametrize("mode", (0, 1, 2, 3))
BOTH_MAJORS = pytest.mark.parametrize("major", MAJORS)


# The set

@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_case_compiles(name):
    """Without a warning, a spill or a C75xx line, for each arch that has the instruction."""
    pytest.importorskip("cuda.bindings.nvrtc")
    for arch in CASES[name].archs:
        assert "warning" not in CASES[name].compile(arch).log


def test_every_function_of_the_drawer_has_a_case():
    code = {path.stem: re.sub(r"//.*", "", path.read_text()) for path in DRAWER.glob("*.cuh")}
    functions = {name for text in code.values()
                 for name in re.findall(r"FG_DEVICE [\w\s*]*?\b(\w+)\(", text)}
    assert len(functions) > 60
    texts = "\n".join(case.body for case in CASES.values())
    reached = {name for name in functions if re.search(rf"\b{name}\b", texts)}
    # Helpers that only other functions of the drawer call.
    assert functions - reached == {"smem_addr_in_cta", "pin_registers"}


def test_inputs_and_models_fit_the_parameters():
    for case in CASES.values():
        inputs = case.inputs(np.random.default_rng(1))
        before = {name: array.copy() for name, array in inputs.items()}
        expected = case.model(inputs)
        assert set(inputs) == set(case.pointers), case.name
        assert all(inputs[name].tobytes() == array.tobytes() for name, array in before.items()), case.name
        assert not any(case.pointers[name].startswith("const ") for name in expected), case.name
        assert {spec.buffer for spec in case.maps.values()} <= set(inputs) and case.smem <= 227 << 10, case.name
        # The kernel must have something to do, and a wrong bit must be seen.
        assert case.compare(expected, inputs), case.name
        assert not case.compare(expected, expected)
        for name, array in expected.items():
            wrong = array.copy()
            wrong.reshape(-1).view(np.uint8)[-1] ^= 0x40
            assert case.compare({name: array}, {name: wrong}), (case.name, name)


def test_texts_use_the_drawer_only():
    for case in CASES.values():
        assert not re.search(r"\basm\b|__shared__|__sync|__shfl", case.text), case.name


# Formats

@pytest.mark.parametrize("element, dtype", [("bf16", torch.bfloat16), ("fp16", torch.float16),
                                            ("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
def test_formats_are_those_of_torch(element, dtype):
    bits = ptx.all_bits(element)
    expected = torch.from_numpy(bits.view(np.int8 if bits.itemsize == 1 else np.int16)).view(dtype).float().numpy()
    np.testing.assert_array_equal(ptx.TO_FLOAT[element](bits), expected)
    small = np.arange(-4, 5)
    assert np.array_equal(ptx.TO_FLOAT[element](ptx.bits_of(element, small)), small)


@pytest.mark.parametrize("element, round_to", [("bf16", ptx.float_to_bf16), ("fp16", ptx.float_to_fp16)])
def test_rounding_is_to_nearest_even(element, round_to):
    """Between neighbours of the format: below, at and above the middle. Also beyond the largest, and NaN."""
    positive = np.arange(0x7f80 if element == "bf16" else 0x7c00).astype(np.uint16)
    values = ptx.TO_FLOAT[element](positive).astype(np.float64)
    middle = (values[:-1] + values[1:]) / 2
    exact = middle.astype(np.float32) == middle  # the rest are below the smallest float
    even = np.where(positive[:-1] % 2 == 0, positive[:-1], positive[1:])
    assert exact.mean() > 0.98
    x = middle[exact].astype(np.float32)
    np.testing.assert_array_equal(round_to(x), even[exact])
    np.testing.assert_array_equal(round_to(np.nextafter(x, np.float32(-1))), positive[:-1][exact])
    np.testing.assert_array_equal(round_to(np.nextafter(x, np.float32(np.inf))), positive[1:][exact])
    np.testing.assert_array_equal(round_to(-x), even[exact] | 0x8000)
    last = np.float32(values[-1])
    half_step = np.float32((values[-1] - values[-2]) / 2)
    infinity = positive.size
    np.testing.assert_array_equal(round_to(np.array([last, np.nextafter(last + half_step, np.float32(0)),
                                                     last + half_step, np.inf], np.float32)),
                                  [infinity - 1, infinity - 1, infinity, infinity])
    np.testing.assert_array_equal(round_to(np.array([np.nan, -np.nan], np.float32)), [0x7fff, 0x7fff])


# Layouts

def test_fragments_cover_each_element_once():
    for n in (8, 64, 256):
        for threads in (32, 128):
            row, column = ptx.accumulator(n, threads)
            cells = row * n + column
            assert np.array_equal(np.sort(cells.ravel()), np.arange(threads // 2 * n))
    for size in (1, 2):
        row, k = ptx.a_fragment(size, 128)
        assert np.array_equal(np.sort((row * 32 // size + k).ravel()), np.arange(64 * 32 // size))
    k, column = ptx.b_fragment()
    assert np.array_equal(np.sort((k * 8 + np.broadcast_to(column, k.shape)).ravel()), np.arange(128))


def test_packed_scores_are_the_next_operand():
    """Accumulators d[8j .. 8j + 7], packed in pairs, are the A fragment of the j-th 16 columns."""
    row, column = ptx.accumulator(16, 128)
    a_row, a_column = ptx.a_fragment(2, 128)
    np.testing.assert_array_equal(row.reshape(128, 4, 2), a_row)
    np.testing.assert_array_equal(column.reshape(128, 4, 2), a_column)


def test_ldmatrix_makes_the_operands_of_mma():
    """A 16x16 tile in the order (row, column) = (0, 0) (8, 0) (0, 8) (8, 8) is A; two 8x8 blocks side by side are B."""
    row, column = ptx.matrix_fragment()
    a_row, a_k = ptx.a_fragment(2, 32)
    for r in range(4):
        assert np.array_equal(a_row[:, r], row + r % 2 * 8) and np.array_equal(a_k[:, r], column + r // 2 * 8)
    b_k, b_column = ptx.b_fragment()
    for r in range(2):
        assert np.array_equal(np.broadcast_to(b_column, b_k.shape)[:, r], row)
        assert np.array_equal(b_k[:, r], column + 8 * r)


def test_swizzle_is_an_xor_of_chunk_and_row():
    for width, of_row in ((128, lambda row: row % 8), (64, lambda row: row // 2 % 4), (32, lambda row: row // 4 % 2)):
        row, chunk, byte = np.indices((16, width // 16, 16))
        plain = row * width + chunk * 16 + byte
        np.testing.assert_array_equal(ptx.swizzle(plain, width), row * width + (chunk ^ of_row(row)) * 16 + byte)


@pytest.mark.parametrize("boxes", [*BY_RANK, *BY_SWIZZLE], ids=lambda boxes: f"{boxes.rank}d_{boxes.spec.swizzle}")
def test_tensor_load_is_a_slice_of_the_padded_tensor(boxes):
    spec, size = boxes.spec, boxes.spec.element_bytes
    buffer = np.random.default_rng(2).integers(0, 256, boxes.tensor_bytes(), dtype=np.uint8)
    view = np.lib.stride_tricks.as_strided(
        buffer, (*spec.dims[::-1], size), (*spec.strides[::-1], size, 1), writeable=False)
    first, last = np.min(boxes.coords, 0), np.max(boxes.coords, 0) + spec.box
    before, after = np.maximum(-first, 0), np.maximum(last - spec.dims, 0)
    wide = np.pad(view, [*zip(before[::-1], after[::-1], strict=True), (0, 0)])
    for coords in boxes.coords:
        window = [slice(start, start + extent) for start, extent in zip(coords + before, spec.box, strict=True)]
        rows = wide[tuple(window[::-1])].reshape(-1, spec.box[0] * size)
        image = ptx.tensor_load(spec, buffer, np.array(coords))
        for number, row in enumerate(rows):
            places = ptx.swizzle(number * rows.shape[1] + np.arange(rows.shape[1]), spec.swizzle)
            np.testing.assert_array_equal(image[places], row)


@MODES
@BOTH_MAJORS
@pytest.mark.parametrize("rows", (8, 64, 96, 256))
def test_right_descriptors_read_what_a_tensor_copy_left(rows, major, mode):
    """A matrix [rows][32], or its transpose, copied panel by panel with the swizzle, is read back by both k-steps."""
    width = products.CHUNKS[mode] * 8  # elements in a row of a panel
    rng = np.random.default_rng(3)
    matrix = rng.integers(0, 65536, (rows, 32), dtype=np.uint16)
    stored = matrix if major == "K_MAJOR" else np.ascontiguousarray(matrix.T)
    columns = -(-stored.shape[1] // width) * width  # a panel may reach past the tensor: the copy fills with zeros
    spec = TensorMapSpec("tensor", "bf16", stored.shape[::-1], (stored.shape[1] * 2,), (width, stored.shape[0]),
                         width * 2 if mode else 0)
    image = np.concatenate([ptx.tensor_load(spec, stored, np.array([first, 0])) for first in range(0, columns, width)])
    operand = products.right_layout(rows, major, mode)
    for step in (0, 1):
        addresses = operand.addresses(rows, 2, major, step)
        np.testing.assert_array_equal(image.view(np.uint16)[addresses // 2], matrix[:, 16 * step:16 * step + 16])


@MODES
@BOTH_MAJORS
def test_wrong_strides_read_elsewhere_where_the_stride_is_used(major, mode):
    def moved(**change: int) -> bool:
        other = dataclasses.replace(right, **change)
        return not np.array_equal(other.addresses(64, 2, major, 0), right.addresses(64, 2, major, 0))

    right = products.right_layout(64, major, mode)
    width = products.CHUNKS[mode]
    assert moved(stride=2 * right.stride) and moved(start=right.start + 32)
    # LBO counts without a swizzle, and between panels along M or N: 64 are one panel of 128 bytes.
    assert moved(leading=right.leading + 1024) == (width == 1 or (major == "MN_MAJOR" and width < 8))


# Rendered wgmma

def test_wgmma_text_lists_each_operand_once():
    for element in PTX_TYPES:
        for source in ("shared", "registers"):
            for n in range(8, 257, 8):
                text = render_wgmma([WgmmaShape(element, n, source)])
                assert max(map(len, text.splitlines())) <= 120
                assert len(re.findall(r"\basm\b", text)) == 1
                product = "".join(re.findall(r'"(.*?)(?:\\n)?"', text)).partition("wgmma.mma_async")[2]
                operands = [int(i) for i in re.findall(r"%(\d+)", product)]
                others = 2 if source == "shared" else 5
                assert operands == list(range(n // 2 + others))
                assert f"setp.ne.b32 add, %{n // 2 + others}, 0;" in text
                constraints = re.findall(r'"(\+f|l|r)"\(', text)
                assert constraints == ["+f"] * (n // 2) + (["l"] if others == 2 else ["r"] * 4) + ["l", "r"]
                k = 32 if element in ("e4m3", "e5m2") else 16
                assert f".m64n{n}k{k}.f32.{PTX_TYPES[element]}.{PTX_TYPES[element]} " in text


@pytest.mark.parametrize("source", ["shared", "registers"])
def test_all_steps_of_a_statement_add_to_the_same_registers(source):
    text = "".join(re.findall(r'"(.*?)(?:\\n)?"', render_wgmma([WgmmaShape("bf16", 16, source, steps=3)])))
    products = re.findall(r"wgmma\.mma_async\S* \{(.*?)\}, (.*?), (add|1), 1, 1", text)
    assert [product[0] for product in products] == [", ".join(f"%{i}" for i in range(8))] * 3
    assert [product[2] for product in products] == ["add", "1", "1"]  # only the first may overwrite
    operands = [int(i) for product in products for i in re.findall(r"%(\d+)", product[1])]
    assert sorted(operands) == list(range(8, 8 + 3 * (2 if source == "shared" else 5)))


def test_products_are_cut_as_the_header_cuts_them():
    (steps,) = re.findall(r"STATEMENT_STEPS = (\d+);", header_text("flashgen/gemm_async.cuh"))
    for total in range(1, 17):
        of_total = [min(int(steps), total - first) for first in range(0, total, int(steps))]
        shapes = product_shapes("bf16", 64, "shared", "K_MAJOR", "K_MAJOR", 16 * total)
        assert sorted(shape.steps for shape in shapes) == sorted(set(of_total))


def test_wgmma_text_is_sorted_and_without_repeats():
    shapes = [WgmmaShape("fp16", 64), WgmmaShape("bf16", 128), WgmmaShape("bf16", 64), WgmmaShape("fp16", 64)]
    assert render_wgmma(shapes) == render_wgmma(shapes[::-1])
    assert render_wgmma(shapes).count("template <>") == 3
    names = re.findall(r"wgmma_ss<(\d+), K_MAJOR, K_MAJOR>\((\w+)", render_wgmma(shapes))
    assert all(a < b for a, b in pairwise([(element, int(n)) for n, element in names]))


@pytest.mark.parametrize("change", [
    {"element": "tf32"}, {"n": 0}, {"n": 12}, {"n": 264}, {"a_source": "tensor"}, {"b_major": "M"},
    {"element": "e4m3", "b_major": "MN_MAJOR"}, {"a_source": "registers", "a_major": "MN_MAJOR"}, {"steps": 0}])
def test_wgmma_refuses_what_the_instruction_lacks(change):
    with pytest.raises(PlanError, match="allowed"):
        WgmmaShape(**{"element": "bf16", "n": 64, **change})


def test_a_shape_that_was_not_rendered_does_not_compile():
    pytest.importorskip("cuda.bindings.nvrtc")
    case = CASES["wgmma_ss_bf16_n64_kk_integers_mode1"]
    other = dataclasses.replace(case, shapes=(WgmmaShape("bf16", 64, "shared", "K_MAJOR", "MN_MAJOR"),))
    with pytest.raises(CompileError, match="deleted function"):
        other.compile()
