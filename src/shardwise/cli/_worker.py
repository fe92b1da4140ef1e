"""What `shardwise launch` starts on every rank: runs a script as `python script.py` does and reports its end.

A rank does not print its own traceback. It writes how it ended to the file that the launcher named, so that
the launcher can print the one traceback that explains the failure, after every rank is gone. This file is run
by its path and imports the standard library only: the script is the first to import torch, under its own
settings.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import os
import runpy
import sys
import time
import traceback
import types

REPORT_VARIABLE = "SHARDWISE_RANK_REPORT"

# How a rank notices that another one is gone: such an error is shown only if there is no other cause.
_CONSEQUENCE_TYPES = frozenset({"CommError", "DistBackendError", "DistNetworkError", "DistStoreError"})
_CONSEQUENCE_TEXTS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
)

# A process group whose peers are gone can hang while the interpreter shuts down; exit handlers get this long.
_SECONDS_TO_LEAVE = 30.0


def main(argv: list[str]) -> int:
    """Run `[-m] target args...` as `__main__` and return the exit code, after reporting how it ended."""
    report = os.environ.pop(REPORT_VARIABLE, None)
    try:
        run(argv)
    except KeyboardInterrupt:
        return 130
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            code, message = error.code or 0, ""
        else:
            code, message = 1, f"{error.code}\n"
        _report(report, {"kind": "exit" if code else "done", "code": code, "text": message})
        return code
    except BaseException as error:
        text, consequence = describe(error), is_consequence(error)
        _report(report, {"kind": "exception", "code": 1, "text": text, "consequence": consequence})
        _run_custom_excepthook(error)
        faulthandler.dump_traceback_later(_SECONDS_TO_LEAVE, exit=True, file=open(os.devnull, "w"))  # noqa: SIM115
        return 1
    _report(report, {"kind": "done", "code": 0, "text": ""})
    return 0


def run(argv: list[str]) -> None:
    """Run a script (`path args...`) or a module (`-m name args...`) as `__main__`."""
    here = os.path.dirname(os.path.abspath(__file__))
    if sys.path and os.path.abspath(sys.path[0]) == here:
        del sys.path[0]
    adds_path = not getattr(sys.flags, "safe_path", False)
    if argv[0] == "-m":
        sys.argv = argv[1:]
        if adds_path:
            sys.path.insert(0, os.getcwd())
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = argv
    path = os.path.abspath(argv[0])
    if adds_path:
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    # Not runpy.run_path: it takes the module out of sys.modules before exit handlers are done with it.
    module = types.ModuleType("__main__")
    module.__file__ = path
    sys.modules["__main__"] = module
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec")
    exec(code, module.__dict__)


def describe(error: BaseException) -> str:
    """The traceback of `error` as text, without the frames of this file and of runpy above the script's."""
    frames = error.__traceback__
    while frames is not None and _is_ours(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def is_consequence(error: BaseException) -> bool:
    """Whether `error`, or an error behind it, is a lost connection to another rank."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if any(kind.__name__ in _CONSEQUENCE_TYPES for kind in type(cause).__mro__):
            return True
        if isinstance(cause, (RuntimeError, OSError)) and any(text in str(cause) for text in _CONSEQUENCE_TEXTS):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _is_ours(filename: str) -> bool:
    return filename in (__file__, "<frozen runpy>") or filename == getattr(runpy, "__file__", None)


def _run_custom_excepthook(error: BaseException) -> None:
    # Crash reporters hook in here. They still run; what they print would be a second copy of the traceback.
    if sys.excepthook is not sys.__excepthook__:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
            sys.excepthook(type(error), error, error.__traceback__)


def _report(path: str | None, record: dict[str, object]) -> None:
    if path is None:  # Started by hand: there is no launcher to tell.
        sys.stderr.write(str(record["text"]))
        return
    # Written aside and renamed: the launcher may end this process at any moment.
    with open(path + ".part", "w", encoding="utf-8") as file:
        json.dump({"time": time.time(), **record}, file)
    os.replace(path + ".part", path)


def _leave(code: int) -> None:
    # A failed rank skips the destructors of its process groups: with peers gone, gloo's threads can abort in them and
    # write a last line under the traceback that matters.
    if code:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    _leave(main(sys.argv[1:]))
