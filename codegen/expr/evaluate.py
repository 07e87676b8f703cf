"""Expressions evaluated on arrays, by numpy or torch: the meaning that the CUDA text is tested against.

The module is given by the caller, so this imports neither. Integers are int32 and wrap. Floats are of one dtype:
"float32" as in CUDA, or "float64" for a reference; literals are float32 numbers in both.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from typing import Any

from flashgen.codegen.expr.tree import Const, Expr, Index, Name, Op, TensorParam
from flashgen.errors import SpecError


def evaluate(tree: Expr, env: Mapping[str, Any], xp: Any, dtype: str = "float32") -> Any:
    """The value of a tree for every element of its operands, which are broadcast together as in numpy.

    `env` gives each name that the tree reads a number or an array: q_pos of shape (m, 1) and kv_pos of shape (1, n)
    give (m, n), and less where the tree does not read both. A tensor parameter is an array; where one of its dimensions
    is total_q or total_kv, env also gives seqlen_q or seqlen_kv, and the first row of the sequence as q_begin or
    kv_begin (0 if missing). The result is an array of dtype, int32 or bool, of no dimensions where nothing else was
    given.

    The tree is taken as it is: for what a kernel must agree with, pass the canonical one. Raises SpecError for a name
    that env lacks, or a tensor whose number of dimensions is not the declared one.
    """
    quiet: AbstractContextManager[Any] = xp.errstate(all="ignore") if hasattr(xp, "errstate") else nullcontext()
    with quiet:
        return _Evaluator(env, xp, dtype).value(tree)


class _Evaluator:
    def __init__(self, env: Mapping[str, Any], xp: Any, dtype: str) -> None:
        self.env, self.xp = env, xp
        # Older torch takes no int32 as an index, and older numpy has no `bool`.
        self.dtypes = {"int": xp.int32, "float": getattr(xp, dtype), "index": xp.int64,
                       "bool": xp.bool if hasattr(xp, "Tensor") else xp.bool_}
        self.memo: dict[tuple[str, str], Any] = {}
        self.device = next((value.device for value in env.values()
                            if hasattr(xp, "Tensor") and isinstance(value, xp.Tensor) and value.ndim), None)

    def array(self, value: Any, kind: str) -> Any:
        if hasattr(self.xp, "as_tensor"):
            return self.xp.as_tensor(value, dtype=self.dtypes[kind], device=self.device)
        return self.xp.asarray(value, dtype=self.dtypes[kind])

    def read(self, name: str, default: Any = None) -> Any:
        value = self.env.get(name, default)
        if value is None:
            raise SpecError(f"{name} has no value", where="env", allowed="a number or an array for each name",
                            next=f"given: {', '.join(self.env)}")
        return value

    def value(self, tree: Expr) -> Any:
        key = (tree.text, tree.type)
        if key not in self.memo:
            self.memo[key] = self.compute(tree)
        return self.memo[key]

    def compute(self, tree: Expr) -> Any:
        if isinstance(tree, Const):
            return self.array(tree.value, tree.type)
        if isinstance(tree, Name):
            return self.array(self.read(tree.name), tree.type)
        if isinstance(tree, Index):
            return self.element(tree)
        args = [self.value(arg) for arg in tree.args]
        if tree.op == "float":
            return self.array(args[0], "float")
        if tree.op in ("floordiv", "mod"):
            return self.divided(tree.op, *args)
        if tree.op == "abs":
            return self.xp.abs(args[0])
        return self.apply(tree, args)

    def apply(self, tree: Op, args: list[Any]) -> Any:
        xp = self.xp
        chains: dict[str, Callable[[Any, Any], Any]] = {
            "add": lambda a, b: a + b, "mul": lambda a, b: a * b, "div": lambda a, b: a / b,
            "and": lambda a, b: a & b, "or": lambda a, b: a | b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
            "eq": lambda a, b: a == b, "ne": lambda a, b: a != b,
            # Of a number and a NaN, the number, as fminf and fmaxf have it.
            "min": xp.fmin if tree.type == "float" else xp.minimum,
            "max": xp.fmax if tree.type == "float" else xp.maximum}
        if tree.op in chains:
            return reduce(chains[tree.op], args)
        if tree.op == "select":
            return xp.where(*args)
        if tree.op == "sigmoid":
            one = self.array(1, "float")
            return one / (one + xp.exp(-args[0]))
        if tree.op in ("neg", "not"):
            return -args[0] if tree.op == "neg" else ~args[0]
        return {"exp": xp.exp, "log": xp.log, "tanh": xp.tanh}[tree.op](args[0])

    def divided(self, op: str, top: Any, bottom: Any) -> Any:
        """Rounded down; 0 for a divisor of 0. For -1, which overflows with the least int, by negation."""
        xp = self.xp
        zero, odd = self.array(0, "int"), (bottom == 0) | (bottom == -1)
        safe = xp.where(odd, self.array(1, "int"), bottom)
        if op == "mod":
            return xp.where(odd, zero, xp.remainder(top, safe))
        quotient = xp.floor_divide(top, safe)
        return xp.where(bottom == -1, -top, xp.where(bottom == 0, zero, quotient))

    def element(self, tree: Index) -> Any:
        tensor = self.array(self.read(tree.param.name), tree.param.type)
        if tensor.ndim != len(tree.param.shape):
            raise SpecError(f"{tree.param.name} has {tensor.ndim} dimensions", where="env", allowed=str(tree.param))
        places = [self.place(self.value(arg), tree.param, i, tensor.shape[i]) for i, arg in enumerate(tree.args)]
        if len(places) > 1:
            places = list(self.xp.broadcast_arrays(*places) if hasattr(self.xp, "broadcast_arrays")
                          else self.xp.broadcast_tensors(*places))
        return tensor[tuple(places)]

    def place(self, index: Any, param: TensorParam, dim: int, size: int) -> Any:
        """The nearest index inside a dimension, where a sequence of a packed one begins at its own row."""
        side = {"total_q": "q", "total_kv": "kv"}.get(str(param.shape[dim]))
        begin, limit = self.array(0, "int"), self.array(size, "int")
        if side:
            begin = self.array(self.read(f"{side}_begin", 0), "int")
            limit = self.array(self.read(f"seqlen_{side}"), "int")
        inside = self.xp.maximum(self.xp.minimum(index, limit - 1), self.array(0, "int"))
        return self.array(begin + inside, "index")
