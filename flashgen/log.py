"""One dial for what flashgen says of itself: FLASHGEN_LOG=0..4, on standard error.

0 nothing, 1 warnings (the default), 2 also kernels compiled and loaded, 3 also which kernel serves which kind of call,
4 also inputs copied and calls prepared anew.
"""
from __future__ import annotations

import functools
import logging
import os

_LEVELS = {"0": logging.CRITICAL, "1": logging.WARNING, "2": logging.INFO, "3": logging.DEBUG, "4": 1}
CHATTER = 1  # the level of messages that only FLASHGEN_LOG=4 shows


@functools.cache
def logger() -> logging.Logger:
    log = logging.getLogger("flashgen")
    asked = os.environ.get("FLASHGEN_LOG", "")
    if asked in _LEVELS:  # otherwise the application's own configuration decides
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("flashgen: %(message)s"))
        log.addHandler(handler)
        log.setLevel(_LEVELS[asked])
        log.propagate = False
    return log
