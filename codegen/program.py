"""A Program: what one call launches, step after step, and the buffers that it needs beside the call's own tensors.

Launch rules (codegen/families/<family>/launch.py) make programs from plans and the sizes of a call. Pure data: a bundle
launches with it and without specs, pydantic or Jinja. Steps of one program run in order on one stream, so that a step
finds what those before it wrote.
"""
from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

Number = int | float
BUFFER_DTYPES = {"f32": "float32", "i32": "int32", "bf16": "bfloat16", "fp16": "float16"}  # as torch names them
Life = Literal["scratch", "zeroed", "counters"]


class Buffer(NamedTuple):
    """Device memory that a call needs; steps name it as a pointer parameter. Without elements it is a null pointer.

    A program has at most one buffer of counters, which all launches on a stream share.
    """

    name: str
    dtype: str               # key of BUFFER_DTYPES
    shape: tuple[int, ...]
    life: Life = "scratch"   # of one call; of one call, and cleared first; found zero, and left zero by the kernels

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class Step(NamedTuple):
    """One launch of one kernel."""

    kernel: str                  # the plan it launches, by its name in the program: Plan.step
    grid_x: int                  # blocks
    threads: int                 # of a block
    values: Mapping[str, Number]  # by name: every parameter that is no pointer, and all that tensor maps are made of
    cooperative: bool = False    # blocks wait for each other, so all of them must run at once
    unless: str = ""             # a tensor of the call that makes the step needless


class Program(NamedTuple):
    steps: tuple[Step, ...]
    buffers: tuple[Buffer, ...] = ()

    def step(self, kernel: str) -> Step:
        return next(step for step in self.steps if step.kernel == kernel)

    def buffer(self, name: str) -> Buffer:
        return next(buffer for buffer in self.buffers if buffer.name == name)

    def given(self, names: set[str]) -> Program:
        """What is left to do where the caller gives the tensors of these names."""
        return Program(tuple(step for step in self.steps if step.unless not in names),
                       tuple(buffer for buffer in self.buffers if buffer.name not in names))

    def with_values(self, values: Mapping[str, Number]) -> Program:
        """The program with more parameter values in every step."""
        return self._replace(steps=tuple(step._replace(values={**step.values, **values}) for step in self.steps))
