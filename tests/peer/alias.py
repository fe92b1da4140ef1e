"""Lets ``import accelerate`` find shardwise: the peer's test scripts then test this library.

Of the peer's package only its ``test_utils`` are used, which are what its scripts are made of; every other module of it
is answered by the module of the same name here.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

PEER = "accelerate"
# The modules that the scripts import, and where their names are found here.
OURS = {
    "accelerate": ("shardwise", "shardwise.accelerator"),
    "accelerate.accelerator": ("shardwise.accelerator",),
    "accelerate.data_loader": ("shardwise.data_loader",),
    "accelerate.state": ("shardwise.state",),
    "accelerate.utils": ("shardwise.utils",),
    "accelerate.utils.dataclasses": ("shardwise.utils.dataclasses",),
    "accelerate.utils.operations": ("shardwise.utils.operations",),
    "accelerate.logging": ("shardwise.logging",),
    "accelerate.launchers": ("shardwise.launchers",),
}


class Alias(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the peer's modules: ours for those above, the peer's own files for its ``test_utils``.

    Args:
        folder: of the peer's installed package.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name in OURS:
            spec = importlib.machinery.ModuleSpec(name, self, is_package=True)
            spec.submodule_search_locations = [str(self._folder.joinpath(*name.split(".")[1:]))]
            return spec
        if name == f"{PEER}.test_utils":
            # A package whose own __init__ imports much of the peer; the scripts need three names of it.
            spec = importlib.machinery.ModuleSpec(name, self, is_package=True)
            spec.submodule_search_locations = [str(self._folder / "test_utils")]
            return spec
        if name == f"{PEER}.test_utils.testing":
            return importlib.machinery.ModuleSpec(name, self)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == f"{PEER}.test_utils":
            training = importlib.import_module(f"{PEER}.test_utils.training")
            module.RegressionDataset = _seeded(training.RegressionDataset)  # type: ignore[attr-defined]
            module.RegressionModel = training.RegressionModel  # type: ignore[attr-defined]
            module.are_the_same_tensors = _same  # type: ignore[attr-defined]
            module.torch_device = "cpu"  # type: ignore[attr-defined]
            return
        if module.__name__ == f"{PEER}.test_utils.testing":
            module.assert_exception = _assert_exception  # type: ignore[attr-defined]
            return
        homes = OURS[module.__name__]

        def look_up(name: str) -> Any:
            for home in homes:
                found = getattr(importlib.import_module(home), name, None)
                if found is not None:
                    return found
            raise AttributeError(f"{module.__name__} has no {name} here")

        module.__getattr__ = look_up  # type: ignore[attr-defined]


def _seeded(dataset: Any) -> Any:
    """The peer's data with a seed where its scripts give none.

    Their test of accumulation steps the reference in every micro-batch and ours at the end of a window, and allows for
    1 % of a gradient: enough, unless the data that was drawn makes a gradient almost zero.
    """

    class Seeded(dataset):  # type: ignore[misc]
        def __init__(self, a: float = 2, b: float = 3, length: int = 64, seed: int | None = None) -> None:
            super().__init__(a, b, length, 42 if seed is None else seed)

    return Seeded


def _same(tensor: Any) -> bool:
    """Whether all processes have the same tensor: what the peer's helper of this name says."""
    from shardwise.state import AcceleratorState
    from shardwise.utils import gather

    everyone = gather(tensor[None].clone().to(AcceleratorState().device)).cpu()
    return bool((everyone == everyone[0]).all())


@contextlib.contextmanager
def _assert_exception(kind: type[Exception], message: str | None = None) -> Iterator[None]:
    """The block must raise this: what the peer's helper of this name says."""
    try:
        yield
    except kind as error:
        if message is not None and message not in str(error):
            raise AssertionError(f"expected {message!r} in {error}") from error
        return
    raise AssertionError(f"{kind.__name__} was not raised")


def script(name: str) -> ModuleType:
    """One of the peer's scripts. Packages that it imports for parts which need the network are left empty."""
    for package in ("datasets", "evaluate", "transformers"):
        if package not in sys.modules:
            sys.modules[package] = _Empty(package)
    try:
        return importlib.import_module(f"{PEER}.test_utils.scripts.{name}")
    finally:
        for package in ("datasets", "evaluate", "transformers"):
            if isinstance(sys.modules.get(package), _Empty):
                del sys.modules[package]


class _Empty(ModuleType):
    """Any name of it is another one, and calling it does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Empty(name)

    def __call__(self, *_: Any, **__: Any) -> None:
        return None


def folder() -> Path | None:
    """Where the peer's package is: ``peer`` in the virtual environment, else as it is installed; or None."""
    apart = Path(sys.prefix) / "peer"
    if (apart / PEER).is_dir():
        return apart / PEER
    spec = importlib.util.find_spec(PEER)
    return None if spec is None or not spec.submodule_search_locations else Path(spec.submodule_search_locations[0])


def install() -> Path | None:
    """Make the peer's scripts importable. Returns the folder of the peer's package, None if it is not installed."""
    found = folder()
    if found is not None:
        sys.meta_path.insert(0, Alias(found))
        logging.getLogger("accelerate.accelerator")  # a script listens to it
    return found
