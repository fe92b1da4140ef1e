"""``import shardwise``: what it brings along, what it leaves alone, and the names it offers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from typing import Any

import pytest

import shardwise

PUBLIC = [
    "Accelerator",
    "AutocastKwargs",
    "CommError",
    "Config",
    "ConfigError",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "Engine",
    "GradScalerKwargs",
    "InitProcessGroupKwargs",
    "NotYetSupported",
    "PartialState",
    "ProfileKwargs",
    "ShardingError",
    "ShardwiseError",
    "__version__",
    "add_config_arguments",
    "checkpointing",
    "cpu_offload",
    "cpu_offload_with_hook",
    "debug_launcher",
    "disk_offload",
    "dispatch_model",
    "find_executable_batch_size",
    "infer_auto_device_map",
    "init_distributed",
    "init_empty_weights",
    "init_on_device",
    "initialize",
    "is_rich_available",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
    "notebook_launcher",
    "skip_first_batches",
    "synchronize_rng_states",
    "zero",
]

# What the process looks like before and after the import. torch is there in both.
OBSERVE = """
    import atexit, gc, json, logging, os, pathlib, random, signal, sys, threading, warnings
    import torch, torch.distributed, psutil

    def state():
        root = logging.getLogger()
        return {
            "variables": dict(os.environ),
            "threads": sorted(t.name for t in threading.enumerate()),
            "native threads": psutil.Process().num_threads(),
            "children": len(psutil.Process().children()),
            "open files": sorted(f.path for f in psutil.Process().open_files()),
            "sockets": len(psutil.Process().net_connections()),
            "files": sorted(str(p) for p in pathlib.Path.cwd().rglob("*")),
            "process group": torch.distributed.is_initialized(),
            "root handlers": [repr(h) for h in root.handlers],
            "root level": root.level,
            "log class": logging.getLoggerClass().__name__,
            "signals": {s.name: repr(signal.getsignal(s)) for s in signal.valid_signals() if hasattr(s, "name")},
            "exception hooks": [repr(sys.excepthook), repr(threading.excepthook), repr(sys.unraisablehook)],
            "warning filters": [repr(f) for f in warnings.filters],
            "at exit": atexit._ncallbacks(),
            "path": list(sys.path),
            "default dtype": str(torch.get_default_dtype()),
            "torch threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
            "grad mode": torch.is_grad_enabled(),
            "random": [repr(random.getstate()), torch.random.get_rng_state().tolist()],
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "function modes": torch._C._len_torch_function_stack(),
        }

    before = state()
    import shardwise
    after = state()
    ours = logging.getLogger("shardwise")
    print(json.dumps({
        "changed": {k: [before[k], after[k]] for k in before if before[k] != after[k]},
        "modules": sorted(sys.modules),
        "our handlers": [repr(h) for h in ours.handlers],
    }))
"""


def fresh(code: str, cwd: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"},
    )


@pytest.fixture(scope="module")
def observed(tmp_path_factory):
    done = fresh(OBSERVE, cwd=tmp_path_factory.mktemp("import"))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) | {"printed": done.stderr}


@pytest.mark.parametrize(
    "name", ["pydantic", "transformers", "torch._dynamo", "torch._inductor", "sympy", "rich", "typer", "hjson"]
)
def test_import_does_not_load(observed, name):
    assert not [m for m in observed["modules"] if m == name or m.startswith(name + ".")]


def test_import_changes_nothing_in_the_process(observed):
    assert observed["changed"] == {}
    assert observed["our handlers"] == []
    assert observed["printed"] == ""


def test_the_public_names():
    assert sorted(shardwise.__all__) == PUBLIC
    assert all(hasattr(shardwise, name) for name in PUBLIC)
    assert shardwise.zero.__all__ == ["GatheredParameters", "Init", "register_external_parameter"]
    everything: dict[str, Any] = {}
    exec("from shardwise import *", everything)
    assert set(PUBLIC) <= everything.keys()


def test_the_configuration_is_loaded_when_it_is_asked_for():
    from shardwise.config import Config

    assert shardwise.Config is Config


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="module 'shardwise' has no attribute 'Trainer'"):
        _ = shardwise.Trainer


def test_every_error_is_a_shardwise_error():
    for error in (shardwise.CommError, shardwise.ConfigError, shardwise.NotYetSupported, shardwise.ShardingError):
        assert issubclass(error, shardwise.ShardwiseError)
    assert issubclass(shardwise.NotYetSupported, shardwise.ConfigError)
    assert issubclass(shardwise.ConfigError, ValueError)


def test_the_version_is_that_of_the_distribution():
    from importlib.metadata import version

    assert shardwise.__version__ == version("shardwise")
