"""The operations of flashgen, a row each."""
from __future__ import annotations

from flashgen.runtime.ops.attention.signature import ATTENTION
from flashgen.runtime.ops.mla_decode.signature import MLA_DECODE, MLA_SCHEDULE
from flashgen.runtime.ops.op import Signature

SIGNATURES: tuple[Signature, ...] = (ATTENTION, MLA_DECODE, MLA_SCHEDULE)
