"""Where the engine's own process begins: ``python -m sidestream.engine.start_engine_process ADDRESS``."""

from __future__ import annotations

import sys
import time


def main() -> int:
    """Import the engine, timed, and run it; the process's exit code."""
    began = time.monotonic()
    from sidestream.engine.engine_process import main as run

    return run(sys.argv[1], began=began)


if __name__ == "__main__":
    sys.exit(main())
