"""The spec that `flashgen new` writes: one that checks and builds as it is, with a comment for each thing to change."""
from __future__ import annotations

import json
import re

from flashgen.codegen.expr.params import MAX_NAME
from flashgen.codegen.expr.tree import SCOPE_NAMES
from flashgen.codegen.families.registry import FAMILIES, fastest_first, op_of, pass_of
from flashgen.codegen.spec.expressions import NONE, plain_params
from flashgen.codegen.spec.spec import Spec, load_specs, spec_path
from flashgen.errors import SpecError

_NAMES = ", ".join(SCOPE_NAMES)
_SCORE, _MASK = "softcap * tanh(score / softcap)", "kv_pos <= q_pos and q_pos - kv_pos < window"
_PARAMS = {"softcap": {"type": "float", "default": 30.0}, "window": {"type": "int", "default": 1024}}


def starter(name: str, base: str) -> str:
    """The text of a spec called `name`, in the family of `base`, with the expressions of `base` or with two examples.

    Raises SpecError for a name that is none or a family without expressions, and what loading `base` raises.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or len(name) > 64:
        raise SpecError(f"{name[:MAX_NAME]!r} cannot name a spec", where="NAME",
                        allowed="lower-case words of letters and digits joined by _, at most 64 characters",
                        nearest=re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")[:64])
    specs = load_specs(spec_path(base)).specs
    spec = min(specs, key=lambda spec: FAMILIES[spec.family].rank)
    family = FAMILIES[spec.family]
    able = [found for found in fastest_first("attention") if all(only.field != "score" for only in found.only)]
    *names, last = sorted(found.name for found in able)
    if op_of(spec) != "attention" or family not in able:
        kind = f"pass {spec.pass_}" if pass_of(spec).follows else f"family {spec.family}"
        raise SpecError(f"{base} is of {kind}, which has no expressions of its own", where="--from", allowed=(
            f"forward specs of {', '.join(names)} and {last}"))
    has_own = bool(spec.expressions) or spec.sink != NONE
    return _TEXT.format(
        name=name, base=spec.name, family=spec.family, about=family.cards,
        arch=spec.arch if has_own else family.arch, head_dim=spec.head_dim_qk if has_own else 128,
        layout=spec.kv_layout if has_own else "dense", body=_expressions(spec) if has_own else _examples())


def _examples() -> str:
    return _SCORE_TEXT.format(_SCORE, names=_NAMES) + _MASK_TEXT.format(_MASK) + _params(_PARAMS) + _OTHERS


def _expressions(spec: Spec) -> str:
    mask = _MASK_TEXT.format(spec.mask) if spec.mask != NONE else _CAUSAL.format(str(spec.causal).lower())
    score = _SCORE_TEXT.format(spec.score, names=_NAMES) if spec.score != NONE else ""
    others = [f"{field}: {value}\n" for field, value, plain in (
        ("sink", spec.sink, NONE), ("normalize", spec.normalize, "softmax"), ("align", spec.align, "bottom_right"),
        ("lse", str(spec.lse).lower(), "true")) if value != plain]
    return score + mask + _params(plain_params(spec.params)) + ("\n" + "".join(others) if others else _OTHERS)


def _params(declared: dict[str, dict[str, object]]) -> str:
    if not declared:
        return ""
    lines = []
    for name, fields in declared.items():
        inner = ", ".join(f"{key}: {json.dumps(value).replace(chr(34), '')}" for key, value in fields.items()
                          if value not in (None, False))
        lines.append(f"  {name}: {{{inner}}}\n")
    return _PARAMS_TEXT + "".join(lines)


_TEXT = """\
# A variant of attention, made by `flashgen new` from {base}. A field takes one value or a list: lists multiply.
# flashgen check {name}.yaml    says what the expressions mean and draws the tiles that the mask visits
# flashgen build {name}.yaml    compiles; flashgen verify {name}.yaml proves it against fp64, --emulate without a GPU
# In Python: flashgen.attention(q, k, v, spec="{name}.yaml", params={{...}})
name: {name}
family: {family}                 # {about}
pass: fwd

arch: {arch}
dtype: [bf16]               # and fp16
head_dim_qk: [{head_dim}]          # multiples of 8 up to 256
kv_layout: {layout}            # varlen: packed sequences
{body}"""
_SCORE_TEXT = """
# What becomes of a score (scaled, before the mask). Names: the params below, and
# {names};
# + - * / // %, comparisons, and, or, not, a if c else b, min, max, abs, exp, log, tanh,
# sigmoid, float, tensor[i], tensor[i, j].
score: {}
"""
_MASK_TEXT = """
# Which keys a query sees. Tiles in which no query sees a key cost nothing. Or, instead: causal: true, or window: true.
mask: {}
"""
_CAUSAL = """
# Or a mask of your own: mask: kv_pos <= q_pos and q_pos - kv_pos < window
causal: {}
"""
_PARAMS_TEXT = """
# Values of a call: another value never builds another kernel. {{type: int, float or bool, default: ...}}, or
# {{type: tensor, dtype: float32, int32 or bool, shape: [num_heads_q]}}; dims are numbers, num_heads_q, num_heads_kv,
# batch, seqlen_q and seqlen_kv (dense), total_q and total_kv (varlen).
params:
""".replace("{{", "{").replace("}}", "}")
_OTHERS = """
# sink: per_head            # a learnt logit per query head in the denominator, params["sink"]
# normalize: none           # weights without a softmax: out = sum of score * v; needs lse: false
"""
