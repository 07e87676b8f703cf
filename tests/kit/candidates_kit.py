"""What the tests of candidate tiles and of `flashgen tune` share: small problems, and what is proposed for them."""
from __future__ import annotations

import functools

from flashgen.codegen.explain.candidates import MAX_CANDIDATES, Candidates, candidates
from flashgen.codegen.explain.counts import Shape
from flashgen.codegen.spec.spec import Spec, load_specs, shipped_spec_paths

SMALL = (Shape(2, 512, 512, 8, 8), Shape(1, 1024, 1024, 8, 8))


@functools.cache
def spec_of(variant: str, arch: str = "") -> Spec:
    return next(spec for path in shipped_spec_paths() for spec in load_specs(path).specs
                if spec.variant == variant and arch in ("", spec.arch))


@functools.cache
def found_for(variant: str, arch: str = "", limit: int = MAX_CANDIDATES) -> Candidates:
    spec = spec_of(variant, arch)
    return candidates(spec, SMALL, limit)
