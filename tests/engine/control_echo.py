"""A rank that only notes when it knew what to do: `test_control_line.py` runs it as a process of its own.

Arguments: port, secret. At the end prints the times, on the clock that all processes of a host share.
"""

from __future__ import annotations

import json
import sys
import time

from ssd_ascend.distributed.control import join
from ssd_ascend.engine.step_message import StepReader


def main(port: int, secret: str) -> None:
    line = join("127.0.0.1", port, secret, 1)
    times, reader = [], StepReader()
    while (message := line.receive()) is not None:
        reader.unpack(message)
        times.append(time.monotonic())
    print(json.dumps(times))
    line.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
