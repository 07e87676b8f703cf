"""Score and mask expressions of a spec: text -> a typed tree, or an error that points at the column.

The grammar is a small part of Python's: + - * / // %, unary -, comparisons (chained too), and, or, not,
`a if c else b`, the functions of expr_tree.FUNCTIONS, name[i] and name[i, j], and int, float, True and False literals.
Text is cut into words by a whitelist first, so that Python's own parser sees nothing else; what it gives is converted
node by node, and the text itself goes nowhere else.
"""
from __future__ import annotations

import ast
import keyword
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn

from flashgen.codegen.expr.canon import canonical
from flashgen.codegen.expr.tree import (
    FLOAT_LEAST,
    FLOAT_MAX,
    FUNCTIONS,
    INT_MAX,
    INT_MIN,
    ROW,
    SCOPE,
    SCOPE_NAMES,
    Const,
    Expr,
    Index,
    Name,
    Op,
    Param,
    ScalarParam,
    TensorParam,
    Type,
    const,
    round_float,
)
from flashgen.errors import SpecError, nearest_word

MAX_TEXT, MAX_DEPTH = 8192, 32    # characters, levels of parentheses and operators in the text
MAX_SIZE, MAX_LEVELS = 600, 96    # of the tree: nodes, and nodes on the longest way down
_WORDS = ("and", "or", "not", "if", "else", "True", "False")
_TOKEN = re.compile(r"(?P<space>[ \t\r\n]+)|(?P<number>(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][+-]?\d[\d_]*)?)"
                    r"|(?P<name>[A-Za-z_][A-Za-z0-9_]*)|(?P<refused>\*\*|<<|>>|->)|(?P<sign>//|[<>=!]=|[-+*/%<>()\[\],])")
_SPEAKS = ("+ - * / // %, < <= > >= == !=, and, or, not, `a if c else b`, " + ", ".join(FUNCTIONS)
           + ", name[i], name[i, j], numbers, True, False")
_REFUSED = {"**": "a power: write a product", "<<": "a shift: write a product", ">>": "a shift: write //",
            "->": "an arrow", ".": "an attribute", ":": "a slice, a lambda or a walrus", "=": "an assignment",
            "'": "a string", '"': "a string", "#": "a comment", "\\": "a backslash", "{": "a set or a dict"}
_BINARY: dict[type[ast.operator], str] = {ast.Add: "add", ast.Sub: "add", ast.Mult: "mul", ast.Div: "div",
                                          ast.FloorDiv: "floordiv", ast.Mod: "mod"}
_COMPARE: dict[type[ast.cmpop], tuple[str, bool]] = {  # (operation, whether the sides change places)
    ast.Lt: ("lt", False), ast.LtE: ("le", False), ast.Gt: ("lt", True), ast.GtE: ("le", True), ast.Eq: ("eq", False),
    ast.NotEq: ("ne", False)}
_NEEDS: dict[str, Type] = {"score": "float", "mask": "bool"}


def parse(text: str, params: Mapping[str, Param], kind: Literal["score", "mask"], where: str = "") -> Expr:
    """The tree as written; a score is a float (an int is converted), a mask is a bool. See canonical() for the next
    step: whatever is printed, evaluated or derived should be the canonical tree.

    `where` is what an error's place begins with, such as "specs/x.yaml:3:9"; the column within the text, from 1, is
    added. Raises SpecError for any text that is not an expression of this grammar, types and limits.
    """
    return _Parser(text, params, kind, where).parse()


class _Parser:
    def __init__(self, text: str, params: Mapping[str, Param], kind: str, where: str) -> None:
        self.text, self.params, self.kind, self.where = text, params, kind, where or kind
        self.scope = {name: type_ for name, type_ in SCOPE.items() if name != "score" or kind == "score"}

    def fail(self, at: int | ast.AST, what: str, allowed: str = _SPEAKS, nearest: str = "", next: str = "") -> NoReturn:
        column = at if isinstance(at, int) else getattr(at, "col_offset", 0)
        raise SpecError(what, where=f"{self.where}:{column + 1}", allowed=allowed, nearest=nearest, next=next)

    def parse(self) -> Expr:
        if not isinstance(self.text, str):
            self.fail(0, f"is {type(self.text).__name__}, not text", "an expression as text")
        self.scan()
        # One line, so that a column counts from the beginning of the text; Python refuses blanks in front.
        line = re.sub(r"[\t\r\n]", " ", self.text)
        pad = len(line) - len(line.lstrip(" "))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                body = ast.parse(line[pad:], mode="eval").body
        except SyntaxError as error:
            at = min(error.offset - 1 + pad, len(line) - 1) if error.offset else len(line.rstrip())  # 0: at the end
            self.fail(at, f"is no expression: {error.msg.split('. ')[0]}")
        except (ValueError, MemoryError, RecursionError, OverflowError):  # what Python's parser raises past its limits
            self.fail(0, "is nested too deeply", f"at most {MAX_DEPTH} levels")
        for node in ast.walk(body):
            if hasattr(node, "col_offset"):
                node.col_offset += pad
        return self.wanted(body, _NEEDS[self.kind], f"a {self.kind}", 0)

    def scan(self) -> None:
        """Refuses all but the words and signs of the grammar, before Python sees the text."""
        if len(self.text) > MAX_TEXT:
            self.fail(MAX_TEXT, f"has {len(self.text)} characters", f"at most {MAX_TEXT}")
        at, depth = 0, 0
        while at < len(self.text):
            found = _TOKEN.match(self.text, at)
            if found is None or found.lastgroup == "refused":
                word = self.text[at] if found is None else found[0]
                shown = word if word.isascii() and word.isprintable() else ascii(word)
                self.fail(at, f"`{shown}` is {_REFUSED.get(word, 'no sign of the language')}")
            word = found[0]
            if found.lastgroup == "name" and keyword.iskeyword(word) and word not in _WORDS:
                self.fail(at, f"`{word}` is a word of Python's that is not in the language")
            depth += (word in ("(", "[")) - (word in (")", "]"))
            if depth > MAX_DEPTH:
                self.fail(at, "is nested too deeply", f"at most {MAX_DEPTH} levels")
            at = found.end()
        if not self.text.strip():
            self.fail(0, "is empty")

    def make(self, at: ast.AST, op: str, args: Sequence[Expr], type_: Type) -> Op:
        """The node, if the whole tree stays small: a chained comparison holds its middle twice, and so on."""
        if sum(arg.size for arg in args) >= MAX_SIZE:
            self.fail(at, "is too large", f"at most {MAX_SIZE} operations, names and numbers; a < b < c counts as "
                                          "a < b and b < c")
        if max(arg.depth for arg in args) >= MAX_LEVELS:
            self.fail(at, "is nested too deeply", f"at most {MAX_LEVELS} operations that wait for one another")
        return Op(op, tuple(args), type_)

    def convert(self, node: ast.AST, depth: int) -> Expr:
        if depth > MAX_DEPTH:
            self.fail(node, "is nested too deeply", f"at most {MAX_DEPTH} levels")
        handler = getattr(self, f"on_{type(node).__name__.lower()}", None)
        if handler is None:
            self.fail(node, f"{type(node).__name__} is not in the language")
        result: Expr = handler(node, depth + 1)
        return result

    def number(self, node: ast.AST, depth: int, what: str) -> Expr:
        tree = self.convert(node, depth)
        if tree.type == "bool":
            self.fail(node, f"{what} takes a bool", "int or float", next="`1 if x else 0` makes a bool an int")
        return tree

    def wanted(self, node: ast.AST, type_: Type, what: str, depth: int) -> Expr:
        tree = self.convert(node, depth)
        if tree.type == type_:
            return tree
        if type_ == "float" and tree.type == "int":
            return self.to_float(node, tree)
        hint = {"bool": "a comparison, such as `x != 0`, makes a number a bool", "int": "// and % give ints of ints"}
        self.fail(node, f"{what} is {_a(tree.type)}", "float or int" if type_ == "float" else type_,
                  next=hint.get(type_, ""))

    def to_float(self, at: ast.AST, tree: Expr) -> Expr:
        if isinstance(tree, Const):
            return const(round_float(float(tree.value)))
        return self.make(at, "float", [tree], "float") if tree.type == "int" else tree

    def promoted(self, at: ast.AST, trees: Sequence[Expr]) -> list[Expr]:
        return [self.to_float(at, t) for t in trees] if any(t.type == "float" for t in trees) else list(trees)

    def on_constant(self, node: ast.Constant, depth: int) -> Expr:
        value = node.value
        if isinstance(value, bool):
            return const(value)
        if isinstance(value, int):
            if value > INT_MAX:
                self.fail(node, "is too large for an int", f"at most {INT_MAX}; more with a decimal point")
            return const(value)
        if not isinstance(value, float):
            self.fail(node, f"{type(value).__name__} is not in the language")
        rounded = round_float(value)
        if abs(rounded) > FLOAT_MAX or (rounded == 0) != (value == 0):
            self.fail(node, f"is too {'large' if rounded else 'small'} for a float32",
                      f"{FLOAT_LEAST:.2g} to {FLOAT_MAX:.2g}, or 0.0")
        return const(rounded)

    def on_name(self, node: ast.Name, depth: int) -> Expr:
        if node.id == ROW:  # in terms of q_pos, so that whatever knows of positions knows of rows
            place, first = (Name(name, "int") for name in ("q_pos", "q_first"))
            return self.make(node, "add", [place, self.make(node, "neg", [first], "int")], "int")
        if node.id in self.scope:
            return Name(node.id, self.scope[node.id])
        param = self.params.get(node.id)
        if isinstance(param, ScalarParam):
            return Name(param.name, param.type, "param")
        if isinstance(param, TensorParam):
            self.fail(node, f"{node.id} is a tensor, used without an index", "name[i]" if len(param.shape) == 1 else
                      "name[i, j]")
        if node.id in FUNCTIONS:
            self.fail(node, f"{node.id} is a function, used without its arguments", f"{node.id}(...)")
        if node.id in SCOPE:
            self.fail(node, f"{node.id} is not known in a mask", ", ".join([*self.scope, *self.params]),
                      next="write what depends on the score as `score:`")
        self.unknown(node, node.id, "name", [*self.scope, ROW, *self.params])

    def unknown(self, at: ast.AST, name: str, what: str, known: Sequence[str]) -> NoReturn:
        self.fail(at, f"{name[:40]} is no known {what}", ", ".join(known), nearest=nearest_word(name, known),
                  next="declare it under `params:`" if what != "function" else "")

    def on_binop(self, node: ast.BinOp, depth: int) -> Expr:
        chain: list[ast.BinOp] = []  # a + b + c nests to the left, as deep as it is long: followed without recursion
        left: ast.AST = node
        while isinstance(left, ast.BinOp):
            chain.append(left)
            left = left.left
        tree = self.number(left, depth, "arithmetic")
        for step in reversed(chain):
            op = _BINARY.get(type(step.op))
            if op is None:
                self.fail(step, f"{type(step.op).__name__} is not in the language")
            tree = self.binary(step, op, tree, self.number(step.right, depth, "arithmetic"))
        return tree

    def binary(self, step: ast.BinOp, op: str, left: Expr, right: Expr) -> Expr:
        if op in ("floordiv", "mod"):
            if (left.type, right.type) != ("int", "int"):
                self.fail(step, f"{'//' if op == 'floordiv' else '%'} of {left.type} and {right.type}", "int and int")
            divisor = canonical(right)
            if isinstance(divisor, Const) and divisor.value == 0:
                self.fail(step.right, "division by zero", "a divisor that is not 0")
            return self.make(step, op, [left, right], "int")
        if isinstance(step.op, ast.Sub):
            right = self.negated(step.right, right)
        if op == "div":
            return self.make(step, op, [self.to_float(step, left), self.to_float(step, right)], "float")
        args = self.promoted(step, [left, right])
        if isinstance(args[0], Op) and args[0].op == op:
            args = [*args[0].args, args[1]]
        return self.make(step, op, args, args[-1].type)

    def negated(self, at: ast.AST, tree: Expr) -> Expr:
        if isinstance(tree, Const) and tree.value != INT_MIN:
            return const(-tree.value)
        return self.make(at, "neg", [tree], tree.type)

    def on_unaryop(self, node: ast.UnaryOp, depth: int) -> Expr:
        if isinstance(node.op, ast.Not):
            return self.make(node, "not", [self.wanted(node.operand, "bool", "the operand of not", depth)], "bool")
        if not isinstance(node.op, ast.USub):
            self.fail(node, f"unary {'+' if isinstance(node.op, ast.UAdd) else '~'} is not in the language")
        operand = node.operand
        if isinstance(operand, ast.Constant) and type(operand.value) is int and operand.value == -INT_MIN:
            return const(INT_MIN)
        return self.negated(node, self.number(operand, depth, "unary -"))

    def on_boolop(self, node: ast.BoolOp, depth: int) -> Expr:
        word = "and" if isinstance(node.op, ast.And) else "or"
        return self.make(node, word, [self.wanted(value, "bool", f"an operand of {word}", depth)
                                      for value in node.values], "bool")

    def on_compare(self, node: ast.Compare, depth: int) -> Expr:
        places = [node.left, *node.comparators]
        sides = [self.convert(place, depth) for place in places]
        results: list[Expr] = []
        for i, operator in enumerate(node.ops):
            if type(operator) not in _COMPARE:
                self.fail(places[i + 1], f"{type(operator).__name__} is not in the language")
            op, swap = _COMPARE[type(operator)]
            kinds = {sides[i].type, sides[i + 1].type}
            if "bool" in kinds and (len(kinds) > 1 or op in ("lt", "le")):
                self.fail(places[i + 1], f"compares {_a(sides[i].type)} with {_a(sides[i + 1].type)}",
                          "two numbers, or == and != of two bools", next="`a < b` of bools is `not a and b`")
            pair = self.promoted(places[i + 1], [sides[i], sides[i + 1]])
            results.append(self.make(node, op, pair[::-1] if swap else pair, "bool"))
        return results[0] if len(results) == 1 else self.make(node, "and", results, "bool")

    def on_ifexp(self, node: ast.IfExp, depth: int) -> Expr:
        condition = self.wanted(node.test, "bool", "the condition", depth)
        branches = [self.convert(node.body, depth), self.convert(node.orelse, depth)]
        if branches[0].type != branches[1].type:
            if "bool" in (branches[0].type, branches[1].type):
                self.fail(node.orelse, f"the branches are {_a(branches[0].type)} and {_a(branches[1].type)}",
                          "two numbers or two bools")
            branches = self.promoted(node, branches)
        return self.make(node, "select", [condition, *branches], branches[0].type)

    def on_call(self, node: ast.Call, depth: int) -> Expr:
        if not isinstance(node.func, ast.Name):
            self.fail(node.func, "only a function's name can be called", ", ".join(FUNCTIONS))
        name = node.func.id
        if name not in FUNCTIONS:
            self.unknown(node.func, name, "function", FUNCTIONS)
        count = len(node.args)
        if node.keywords or (count < 2 if name in ("min", "max") else count != 1):
            self.fail(node, f"{name} takes {'two numbers or more' if name in ('min', 'max') else 'one number'}",
                      f"{name}(a, b, ...)" if name in ("min", "max") else f"{name}(x)")
        args = [self.number(arg, depth, name) for arg in node.args]
        if name in ("min", "max", "abs"):
            args = self.promoted(node, args)
            return self.make(node, name, args, args[0].type)
        args = [self.to_float(node, args[0])]
        return args[0] if name == "float" else self.make(node, name, args, "float")

    def on_subscript(self, node: ast.Subscript, depth: int) -> Expr:
        if not isinstance(node.value, ast.Name):
            self.fail(node.value, "only a tensor's name can be indexed", "name[i], name[i, j]")
        param = self.params.get(node.value.id)
        tensors = [name for name, known in self.params.items() if isinstance(known, TensorParam)]
        if not isinstance(param, TensorParam):
            if param is not None or node.value.id in SCOPE_NAMES:
                self.fail(node.value, f"{node.value.id} is no tensor", ", ".join(tensors) or "no tensor is declared")
            self.unknown(node.value, node.value.id, "tensor", tensors or ["(no tensor is declared)"])
        places: list[Any] = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if len(places) != len(param.shape):
            self.fail(node, f"{param.name} has {len(param.shape)} dimensions and {len(places)} indices",
                      str(param), next="one index for each dimension")
        indices = [self.wanted(place, "int", "an index", depth) for place in places]
        for place, index, dim in zip(places, indices, param.shape, strict=True):
            fixed = canonical(index)
            if isinstance(fixed, Const) and (fixed.value < 0 or (isinstance(dim, int) and fixed.value >= dim)):
                self.fail(place, f"index {fixed.value} is outside {param}",
                          f"0 to {dim - 1}" if isinstance(dim, int) else "0 and more")
        if sum(index.size for index in indices) >= MAX_SIZE:
            self.fail(node, "is too large", f"at most {MAX_SIZE} operations, names and numbers")
        return Index(param, tuple(indices))


def _a(type_: Type) -> str:
    return f"an {type_}" if type_ == "int" else f"a {type_}"
