"""Compile one variant for all of its archs: `python -m flashgen.runtime.build_worker JOB.json RESULT.json`.

Started by ninja (runtime/build.py). The kernels go into the cache; RESULT.json says what happened to each key.
Exit status 1 if one of them failed, so that ninja can stop if it was asked to.
"""
from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from flashgen.codegen.plan import Plan
from flashgen.codegen.source import Source
from flashgen.errors import FlashgenError
from flashgen.runtime.build import error_json
from flashgen.runtime.cache import Cache


def main(job_file: str, result_file: str) -> int:
    job = json.loads(Path(job_file).read_text())
    cache, results = Cache(job["cache"]), {}
    for item in job["items"]:
        start = time.perf_counter()
        raw = item["source"]
        source = Source(**{**raw, "headers": tuple(map(tuple, raw["headers"])), "options": tuple(raw["options"])})
        result: dict[str, object] = {"error": None, "hit": False}
        try:
            entry = cache.build(Plan.from_json(item["plan"]), source)
            assert entry.key == item["key"], "plan or source changed on their way through JSON"
            result |= {"hit": entry.hit, "resources": entry.cubin.resources.to_dict()}
        except FlashgenError as err:
            result["error"] = error_json(err)
        results[item["key"]] = {**result, "seconds": time.perf_counter() - start}
    partial = Path(f"{result_file}.part")
    partial.write_text(json.dumps(results))
    os.rename(partial, result_file)  # a result file is whole or absent
    return int(any(result["error"] for result in results.values()))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
