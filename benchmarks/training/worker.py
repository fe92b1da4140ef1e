"""One rank of one contender: waits for the driver's orders on a pipe.

Started as ``python -m training.worker FD NAME WORKLOAD``, with the rank and the world in the environment.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from .contenders import Training, build, import_library, start_group
from .model import GPT, Data
from .spec import CONTENDERS, Workload


def memory() -> dict[str, int]:
    """Bytes resident now, and at most so far.

    The peak is the kernel's for this address space. ``ru_maxrss`` would do, but a child inherits in it what its parent
    had when it was forked.
    """
    try:
        with open("/proc/self/status") as status:
            fields = dict(line.split(":", 1) for line in status)
        return {"now": _kb(fields["VmRSS"]), "peak": _kb(fields["VmHWM"])}
    except FileNotFoundError:
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return {"now": peak, "peak": peak}


def _kb(text: str) -> int:
    return int(text.split()[0]) * 1024


def take_steps(training: Training, data: Data, count: int) -> dict[str, Any]:
    """Take ``count`` steps; the clock is the machine's, so that the driver can compare that of several ranks."""
    batches = [data.next() for _ in range(count)]
    counted = training.bytes_sent() if training.bytes_sent is not None else 0
    start = time.monotonic()
    losses = [training.step(*batch) for batch in batches]
    end = time.monotonic()
    return {
        "start": start,
        "end": end,
        "losses": [float(loss.detach()) for loss in losses],
        "counted": training.bytes_sent() - counted if training.bytes_sent is not None else None,
        "memory": memory(),
    }


def main() -> None:
    """Build the contender, say so, then do as told until the pipe closes."""
    fd, name, workload = sys.argv[1:]
    pipe: Connection[Any, Any] = Connection(int(fd))
    w = Workload(**json.loads(workload))
    contender = next(c for c in CONTENDERS if c.name == name)
    torch.set_num_threads(w.threads)
    import_library(contender)
    imported = memory()
    start_group(contender)
    torch.manual_seed(0)
    model = GPT(w)
    parameters = sum(p.numel() for p in model.parameters())
    training = build(contender, model, w)
    data = Data(w, int(os.environ["RANK"]))
    pipe.send_bytes(json.dumps({"parameters": parameters, "imported": imported, "built": memory()}).encode())
    while True:
        try:
            count = json.loads(pipe.recv_bytes())
        except (EOFError, OSError):  # the driver is gone
            break
        pipe.send_bytes(json.dumps(take_steps(training, data, count)).encode())
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
