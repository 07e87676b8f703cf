"""The child of ncu.py: one call of one generation between the marks of a profiler range.

    python -m flashgen.runtime.measure.counted '{"stem": ..., "case": {...}, "generation": ..., "backward": false}'
"""
from __future__ import annotations

import json
import sys
from typing import Any

import torch

from flashgen.errors import UnsupportedError
from flashgen.runtime.measure.device import CudaDevice
from flashgen.runtime.measure.lineage import FORWARD, STEP, Generation, Lineage
from flashgen.runtime.ops.registry import lineages


def chosen(task: dict[str, Any], archs: list[str], num_sms: int) -> tuple[Lineage, Any, Generation]:
    """(the lineage, the case, the generation) that a task names. UnsupportedError where no such generation runs."""
    lineage = next(one for one in lineages() if one.stem == task["stem"])
    [case] = lineage.cases(task["case"])
    passes = STEP if task["backward"] else FORWARD
    for generation in lineage.generations(case, archs, num_sms, task["backward"]):
        if (generation.name, generation.passes) == (task["generation"], passes) and not generation.refused:
            return lineage, case, generation
    raise UnsupportedError(f"no generation {task['generation']} {passes}", where="counted")


def main(text: str) -> None:
    device = CudaDevice()
    lineage, case, generation = chosen(json.loads(text), list(device.archs()), device.num_sms)
    timed = lineage.timed()
    call = timed.job(case, generation, timed.inputs(device, case, past_l2=False)).calls()[0]
    call()
    flushed = torch.zeros(2 * device.l2_bytes, dtype=torch.uint8, device=device.place)
    flushed.sum().item()  # read, so that nothing of it has to be written later
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    main(sys.argv[1])
