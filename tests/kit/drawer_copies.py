"""Conformance cases of copies: ldmatrix, stmatrix, cp.async, bulk copies and tensor copies of 1 to 5 dimensions."""
from __future__ import annotations

import dataclasses

import drawer_model as ptx
import numpy as np
from drawer_case import Arrays, Case, TensorMapSpec

WORD = "uint32_t"


def _bytes(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(0, 256, shape, dtype=np.uint8)


def _zeros(*shape: int, dtype: type = np.uint8) -> np.ndarray:
    return np.zeros(shape, dtype)


# Fragments

def _ldmatrix(name: str, transposed: bool) -> Case:
    """Each lane names any of 32 rows."""
    def inputs(rng: np.random.Generator) -> Arrays:
        return {"tile": rng.integers(0, 65536, (32, 8), dtype=np.uint16),
                "rows": rng.permutation(32).astype(np.int32), "out": _zeros(32, 4, dtype=np.uint32)}

    def model(inputs: Arrays) -> Arrays:
        matrices = inputs["tile"][inputs["rows"]].reshape(4, 8, 8)
        row, column = ptx.matrix_fragment()
        index = (column, row) if transposed else (row, column)
        pairs = matrices[:, index[0], index[1]].transpose(1, 0, 2)  # [lane][matrix][2]
        return {"out": np.ascontiguousarray(pairs).view(np.uint32)[..., 0]}

    return Case(name, ("ldmatrix", "warp"), {"tile": "const uint32_t", "rows": "const int", "out": WORD}, f"""
  uint32_t* smem = (uint32_t*)dyn_smem();
  for (int i = threadIdx.x; i < 128; i += 32) smem[i] = p.tile[i];
  sync_block();
  uint32_t r[4];
  {name}(r, smem + 4 * p.rows[threadIdx.x]);
  for (int i = 0; i < 4; ++i) p.out[4 * threadIdx.x + i] = r[i];
""", inputs, model, smem=512, hopper=False)


def _stmatrix(name: str, transposed: bool) -> Case:
    def inputs(rng: np.random.Generator) -> Arrays:
        return {"r": rng.integers(0, 2**32, (32, 4), dtype=np.uint32), "rows": rng.permutation(32).astype(np.int32),
                "out": _zeros(32, 8, dtype=np.uint16)}

    def model(inputs: Arrays) -> Arrays:
        matrices, out = np.empty((4, 8, 8), np.uint16), np.empty((32, 8), np.uint16)
        row, column = ptx.matrix_fragment()
        index = (column, row) if transposed else (row, column)
        matrices[:, index[0], index[1]] = ptx.halves(inputs["r"]).transpose(1, 0, 2)
        out[inputs["rows"]] = matrices.reshape(32, 8)
        return {"out": out}

    return Case(name, ("stmatrix", "warp"), {"r": "const uint32_t", "rows": "const int", "out": WORD}, f"""
  uint32_t* smem = (uint32_t*)dyn_smem();
  uint32_t r[4];
  for (int i = 0; i < 4; ++i) r[i] = p.r[4 * threadIdx.x + i];
  {name}(smem + 4 * p.rows[threadIdx.x], r);
  sync_block();
  for (int i = threadIdx.x; i < 128; i += 32) p.out[i] = smem[i];
""", inputs, model, smem=512)


# cp.async

def _cp_async() -> Case:
    """Three groups in flight, waited for one after the other; every other chunk of the second is zero-filled."""
    def model(inputs: Arrays) -> Arrays:
        out = inputs["x"].copy()
        out[1, 1::2] = 0
        return {"out": out}

    return Case("cp_async", ("cp_async",), {"x": "const Chunk", "out": "Chunk"}, """
  Chunk* smem = (Chunk*)dyn_smem();
  cp_async_16(smem + threadIdx.x, p.x + threadIdx.x);
  cp_async_commit();
  cp_async_16_zfill(smem + 32 + threadIdx.x, p.x + 32 + threadIdx.x, threadIdx.x % 2 ? 0 : 16);
  cp_async_commit();
  cp_async_16(smem + 64 + threadIdx.x, p.x + 64 + threadIdx.x);
  cp_async_commit();
  cp_async_wait<2>();
  p.out[threadIdx.x] = smem[threadIdx.x];
  cp_async_wait<1>();
  p.out[32 + threadIdx.x] = smem[32 + threadIdx.x];
  cp_async_wait<0>();
  p.out[64 + threadIdx.x] = smem[64 + threadIdx.x];
""", lambda rng: {"x": _bytes(rng, 3, 32, 16), "out": _zeros(3, 32, 16)}, model, smem=3 * 512, hopper=False)


# Bulk copies

INIT = """
  unsigned char* smem = dyn_smem();
  uint64_t* barrier = (uint64_t*)(smem + %d);
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, 1);
    fence_mbarrier_init();
  }
  sync_block();
"""
BULK = ("bulk", "fence", "mbarrier", "warp")


def bulk_cases() -> list[Case]:
    pointers = {"x": "const uint32_t", "out": WORD}
    load = Case("bulk_load", BULK, pointers, INIT % 2048 + """
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect_tx(barrier, 1040 + 16);
    bulk_load(smem + 16, p.x + 8, 1040, barrier);
    bulk_load(smem + 1280, p.x, 16, barrier, EVICT_FIRST);
  }
  mbarrier_wait_parity(barrier, 0);
  for (int i = threadIdx.x; i < 260; i += 32) p.out[i] = ((uint32_t*)smem)[4 + i];
  if (threadIdx.x < 4) p.out[260 + threadIdx.x] = ((uint32_t*)smem)[320 + threadIdx.x];
""", lambda rng: {"x": _bytes(rng, 1200), "out": _zeros(1056)},
        lambda inputs: {"out": np.concatenate([inputs["x"][32:1072], inputs["x"][:16]])}, smem=2064)

    def stored(inputs: Arrays) -> Arrays:
        out = inputs["out"].copy()
        out[0, 16:1040], out[1, 16:1040] = inputs["x"][0, :1024], inputs["x"][1, :1024]
        return {"out": out}

    # The second round overwrites the shared memory as soon as the first has been read.
    store = Case("bulk_store", BULK, pointers, """
  uint32_t* smem = (uint32_t*)dyn_smem();
  for (int round = 0; round < 2; ++round) {
    for (int i = threadIdx.x; i < 256; i += 32) smem[i] = p.x[256 * round + i];
    fence_proxy_async_shared();
    sync_block();
    if (threadIdx.x == 0) {
      bulk_store(p.out + 264 * round + 4, smem, 1024);
      bulk_commit();
      bulk_wait_read<0>();
    }
    sync_block();
  }
  if (threadIdx.x == 0) bulk_wait<0>();
""", lambda rng: {"x": _bytes(rng, 2, 1024), "out": _bytes(rng, 2, 1056)}, stored, smem=1024)

    def added(inputs: Arrays) -> Arrays:
        return {"out": inputs["out"] + inputs["x"].sum(0)}

    add = Case("bulk_reduce_add_f32", BULK, {"x": "const float", "out": "float"}, """
  float* smem = (float*)dyn_smem();
  for (int i = threadIdx.x; i < 128; i += 32) smem[i] = p.x[128 * blockIdx.x + i];
  fence_proxy_async_shared();
  sync_block();
  if (threadIdx.x == 0) {
    bulk_reduce_add_f32(p.out, smem, 512);
    bulk_commit();
    bulk_wait<0>();
  }
""", lambda rng: {"x": rng.integers(-99, 99, (8, 128)).astype(np.float32),
                  "out": rng.integers(-99, 99, 128).astype(np.float32)}, added, blocks=8, smem=512)

    # What this kernel wrote to device memory with plain stores, read by TMA.
    around = Case("fence_proxy_async_global", BULK, {"x": "const uint32_t", "between": WORD, "out": WORD},
                  INIT % 1024 + """
  for (int i = threadIdx.x; i < 256; i += 32) p.between[i] = ~p.x[i];
  fence_proxy_async_global();
  sync_block();
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect_tx(barrier, 1024);
    bulk_load(smem, p.between, 1024, barrier);
  }
  mbarrier_wait_parity(barrier, 0);
  for (int i = threadIdx.x; i < 256; i += 32) p.out[i] = ((uint32_t*)smem)[i];
""", lambda rng: {"x": _bytes(rng, 1024), "between": _zeros(1024), "out": _zeros(1024)},
                  lambda inputs: {"out": ~inputs["x"]}, smem=1040)
    return [load, store, add, around]


# Tensor copies

@dataclasses.dataclass(frozen=True)
class Boxes:
    """A map over the buffer `tensor`, and where its boxes are taken from."""
    spec: TensorMapSpec
    coords: tuple[tuple[int, ...], ...]

    @property
    def rank(self) -> int:
        return len(self.spec.dims)

    @property
    def slot(self) -> int:
        """Bytes of the box, up to whole kilobytes."""
        return -(-self.spec.box_bytes // 1024) * 1024

    def arguments(self, of: str = "c") -> str:
        return ", ".join(f"{of}[{i}]" for i in range(self.rank))

    def tensor_bytes(self) -> int:
        strides = (self.spec.element_bytes, *self.spec.strides)
        return strides[-1] * self.spec.dims[-1]

    def coords_array(self) -> np.ndarray:
        return np.array(self.coords, np.int32)

    def not_negative(self) -> Boxes:
        """What stores and sums may have. Seen on an H200: a negative coordinate ends in an illegal instruction, also
        where the box overlaps the tensor; what lies past the end is cut off. Loads write zeros in both cases."""
        return Boxes(self.spec, tuple(c for c in self.coords if min(c) >= 0))


def _spec(element: str, dims: tuple[int, ...], box: tuple[int, ...], swizzle: int) -> TensorMapSpec:
    """Rows with a gap of 16 bytes after each, so that strides are not those of a packed tensor."""
    size, strides = {"u8": 1, "bf16": 2, "f32": 4}[element], []
    stride = -(-dims[0] * size // 16) * 16 + 16
    for dim in dims[1:]:
        strides.append(stride)
        stride *= dim
    return TensorMapSpec("tensor", element, dims, tuple(strides), box, swizzle)


# Inside, over the end, before the start, wholly outside; the last two are for loads alone. Steps of the first
# coordinate are multiples of 16 bytes.
BY_RANK = (
    Boxes(_spec("f32", (100,), (32,), 0), ((0,), (84,), (-12,), (100,), (4,))),
    Boxes(_spec("bf16", (72, 20), (64, 16), 128), ((0, 0), (8, 5), (-16, -3), (0, 19), (72, 0), (16, -16), (56, 11))),
    Boxes(_spec("bf16", (40, 9, 3), (32, 8, 2), 64),
          ((0, 0, 0), (8, 2, 1), (-8, -1, 2), (0, 8, -1), (0, 0, 3), (16, 5, 2))),
    Boxes(_spec("f32", (12, 5, 4, 3), (8, 4, 2, 2), 32),
          ((0, 0, 0, 0), (4, 1, 3, 2), (-4, -2, -1, -1), (0, 4, 0, 1), (0, 0, 4, 0), (8, 3, 1, 1))),
    Boxes(_spec("bf16", (64, 10, 3, 2, 2), (64, 8, 2, 1, 1), 128),
          ((0, 0, 0, 0, 0), (0, 4, 1, 1, 1), (0, -3, 2, 0, 1), (0, 9, -1, 1, 0), (0, 0, 0, 0, 2), (8, 9, 2, 0, 1))),
)
BY_SWIZZLE = tuple(Boxes(_spec(element, (160, 24), (inner, 24), swizzle),
                         ((0, 0), (16, 3), (-32, -8), (144, 17)))
                   for element, inner, swizzle in (("u8", 128, 128), ("u8", 64, 64), ("u8", 32, 32), ("bf16", 32, 64),
                                                   ("bf16", 16, 32), ("bf16", 40, 0), ("f32", 32, 128), ("u8", 112, 0)))


def _loads(boxes: Boxes, name: str) -> Case:
    runs, slot, box = len(boxes.coords), boxes.slot, boxes.spec.box_bytes

    def inputs(rng: np.random.Generator) -> Arrays:
        return {"tensor": _bytes(rng, boxes.tensor_bytes()), "coords": boxes.coords_array(), "out": _zeros(runs, box)}

    def model(inputs: Arrays) -> Arrays:
        return {"out": np.stack([ptx.tensor_load(boxes.spec, inputs["tensor"], c) for c in inputs["coords"]])}

    return Case(name, ("fence", "mbarrier", "tma", "warp"),
                {"tensor": "const unsigned char", "coords": "const int", "out": WORD}, INIT % slot + f"""
  if (threadIdx.x == 0) prefetch_tensormap(&p.map);
  for (int run = 0; run < {runs}; ++run) {{
    const int* c = p.coords + {boxes.rank} * run;
    if (threadIdx.x == 0) {{
      mbarrier_arrive_expect_tx(barrier, {box});
      if (run % 2 == 0) tma_load_{boxes.rank}d(smem, &p.map, barrier, {boxes.arguments()});
      if (run % 2 == 1) tma_load_{boxes.rank}d(smem, &p.map, barrier, {boxes.arguments()}, EVICT_LAST);
    }}
    mbarrier_wait_parity(barrier, run % 2);
    for (int i = threadIdx.x; i < {box // 4}; i += 32) p.out[{box // 4} * run + i] = ((uint32_t*)smem)[i];
    sync_block();
  }}
""", inputs, model, maps={"map": boxes.spec}, smem=slot + 16)


def _multicast(boxes: Boxes) -> Case:
    """Two blocks take turns to issue: to both, or to the other one alone."""
    runs, slot, box = 4, boxes.slot, boxes.spec.box_bytes
    masks = (3, 3, 2, 1)  # run r is issued by block r % 2

    def inputs(rng: np.random.Generator) -> Arrays:
        return {"tensor": _bytes(rng, boxes.tensor_bytes()), "coords": boxes.coords_array(),
                "out": _zeros(2, runs, box)}

    def model(inputs: Arrays) -> Arrays:
        out = _zeros(2, runs, box)
        for block in range(2):
            for run, mask in enumerate(masks):
                if mask >> block & 1:
                    out[block, run] = ptx.tensor_load(boxes.spec, inputs["tensor"], inputs["coords"][run])
        return {"out": out}

    return Case(f"tma_load_{boxes.rank}d_multicast", ("fence", "mbarrier", "tma", "warp"),
                {"tensor": "const unsigned char", "coords": "const int", "out": WORD}, INIT % slot + f"""
  const uint32_t rank = cluster_ctarank();
  int phase = 0;
  cluster_sync();
  for (int run = 0; run < {runs}; ++run) {{
    const int* c = p.coords + {boxes.rank} * run;
    const uint16_t ctas = run == 2 ? 2 : run == 3 ? 1 : 3;
    const bool mine = ctas >> rank & 1;
    if (threadIdx.x == 0) {{
      if (mine) mbarrier_arrive_expect_tx(barrier, {box});
      if (rank == run % 2) tma_load_{boxes.rank}d_multicast(smem, &p.map, barrier, ctas, {boxes.arguments()});
    }}
    if (mine) {{
      mbarrier_wait_parity(barrier, phase);
      phase ^= 1;
      for (int i = threadIdx.x; i < {box // 4}; i += 32)
        p.out[{box // 4} * ({runs} * rank + run) + i] = ((uint32_t*)smem)[i];
    }}
    cluster_sync();
  }}
""", inputs, model, maps={"map": boxes.spec}, smem=slot + 16, blocks=2, cluster=2)


def _stores(boxes: Boxes, name: str) -> Case:
    boxes = boxes.not_negative()
    runs, box = len(boxes.coords), boxes.spec.box_bytes

    def inputs(rng: np.random.Generator) -> Arrays:
        return {"tensor": _bytes(rng, boxes.tensor_bytes()), "coords": boxes.coords_array(),
                "x": _bytes(rng, runs, box)}

    def model(inputs: Arrays) -> Arrays:
        tensor = inputs["tensor"].copy()
        for image, c in zip(inputs["x"], inputs["coords"], strict=True):
            ptx.tensor_store(boxes.spec, tensor, image, c)
        return {"tensor": tensor}

    return Case(name, ("fence", "tma", "warp"), {"tensor": "unsigned char", "coords": "const int",
                                                 "x": "const uint32_t"}, f"""
  uint32_t* smem = (uint32_t*)dyn_smem();
  for (int run = 0; run < {runs}; ++run) {{
    const int* c = p.coords + {boxes.rank} * run;
    for (int i = threadIdx.x; i < {box // 4}; i += 32) smem[i] = p.x[{box // 4} * run + i];
    fence_proxy_async_shared();
    sync_block();
    if (threadIdx.x == 0) {{
      tma_store_{boxes.rank}d(&p.map, smem, {boxes.arguments()});
      bulk_commit();
      bulk_wait<0>();
    }}
    sync_block();
  }}
""", inputs, model, maps={"map": boxes.spec}, smem=boxes.slot)


def _sums(boxes: Boxes) -> Case:
    """Four blocks add boxes of small integers, exact in any order."""
    spec = dataclasses.replace(_spec("f32", boxes.spec.dims, (min(boxes.spec.box[0], 8), *boxes.spec.box[1:]),
                                     0 if boxes.rank == 1 else 32))
    boxes = Boxes(spec, boxes.coords).not_negative()
    runs, box = len(boxes.coords), spec.box_bytes

    def inputs(rng: np.random.Generator) -> Arrays:
        return {"tensor": rng.integers(-99, 99, boxes.tensor_bytes() // 4).astype(np.float32),
                "coords": boxes.coords_array(), "x": rng.integers(-99, 99, (4, runs, box // 4)).astype(np.float32)}

    def model(inputs: Arrays) -> Arrays:
        tensor = inputs["tensor"].copy()
        for block in inputs["x"]:
            for image, c in zip(block, inputs["coords"], strict=True):
                ptx.tensor_add(spec, tensor, image.view(np.uint8), c)
        return {"tensor": tensor}

    return Case(f"tma_reduce_add_{boxes.rank}d", ("fence", "tma", "warp"),
                {"tensor": "float", "coords": "const int", "x": "const float"}, f"""
  float* smem = (float*)dyn_smem();
  for (int run = 0; run < {runs}; ++run) {{
    const int* c = p.coords + {boxes.rank} * run;
    for (int i = threadIdx.x; i < {box // 4}; i += 32) smem[i] = p.x[{box // 4} * ({runs} * blockIdx.x + run) + i];
    fence_proxy_async_shared();
    sync_block();
    if (threadIdx.x == 0) {{
      tma_reduce_add_{boxes.rank}d(&p.map, smem, {boxes.arguments()});
      bulk_commit();
      bulk_wait_read<0>();
    }}
    sync_block();
  }}
  if (threadIdx.x == 0) bulk_wait<0>();
""", inputs, model, maps={"map": spec}, smem=boxes.slot, blocks=4)


def copy_cases() -> list[Case]:
    cases = [_ldmatrix("ldmatrix_x4", False), _ldmatrix("ldmatrix_x4_trans", True), _stmatrix("stmatrix_x4", False),
             _stmatrix("stmatrix_x4_trans", True), _cp_async(), *bulk_cases()]
    for boxes in BY_RANK:
        cases += [_loads(boxes, f"tma_load_{boxes.rank}d"), _multicast(boxes),
                  _stores(boxes, f"tma_store_{boxes.rank}d"), _sums(boxes)]
    for boxes in BY_SWIZZLE:
        kind = f"{boxes.spec.element}_{boxes.spec.box[0]}_swizzle{boxes.spec.swizzle}"
        cases += [_loads(boxes, f"tma_load_{kind}"), _stores(boxes, f"tma_store_{kind}")]
    return cases
