"""The `shardwise` command in a process of its own, forked from a server that has imported torch."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from pathlib import Path
from tempfile import mkdtemp


class Started:
    """`shardwise` with arguments, as a shell would start it but for the import of torch.

    Args:
        cwd: its working directory.
        arguments: of the command.
        environment: all its variables.
    """

    def __init__(self, cwd: Path, arguments: tuple[str, ...], environment: dict[str, str]) -> None:
        self._folder = Path(mkdtemp(prefix="output-", dir=cwd.parent))
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "numpy", "psutil"])
        self._process = context.Process(target=_run, args=(str(cwd), str(self._folder), arguments, environment))
        self._process.start()

    def send_signal(self, number: int) -> None:
        """Send a signal to the command alone."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def communicate(self, timeout: float) -> tuple[int, str, str]:
        """Wait for its end; return its exit code, stdout and stderr."""
        self._process.join(timeout)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
            out, err = self._read()
            raise AssertionError(f"still running after {timeout} s; it said\n{out}{err}")
        code = self._process.exitcode
        self._process.close()
        assert code is not None
        return code, *self._read()

    def _read(self) -> tuple[str, str]:
        return (self._folder / "out").read_text(), (self._folder / "err").read_text()


def _run(cwd: str, folder: str, arguments: tuple[str, ...], environment: dict[str, str]) -> None:
    for name, number in (("out", 1), ("err", 2)):
        file = os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    # As in an interpreter that a shell starts: no job control of the test's own, and text of any kind.
    sys.stdout = os.fdopen(os.dup(1), "w", encoding="utf-8")
    sys.stderr = os.fdopen(os.dup(2), "w", encoding="utf-8", buffering=1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    from shardwise.cli import app

    app(list(arguments), prog_name="shardwise")
