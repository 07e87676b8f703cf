"""The command `flashgen`, also `python -m flashgen`."""
from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and exit. Where it cannot even start, `doctor` still answers."""
    try:
        from flashgen.cli.app import run
    except ImportError as err:
        if sys.argv[1:2] != ["doctor"]:
            sys.exit(f"error: {err}\n  next: flashgen doctor")
        from flashgen.runtime.doctor import main as doctor

        sys.exit(doctor(sys.argv[2:]))
    except KeyboardInterrupt:  # while modules load; later a command hears it
        sys.exit(130)
    run()
