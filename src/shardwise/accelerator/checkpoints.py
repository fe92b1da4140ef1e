"""`save_state` and `load_state`: everything that a run needs to go on."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwise.accelerator.base import Base
from shardwise.accelerator.files import read_json, read_tensors, read_value, write_json, write_tensors, write_value
from shardwise.accelerator.optimizer import AcceleratedOptimizer, EngineOptimizer
from shardwise.accelerator.process import Processes
from shardwise.accelerator.weights import load_into, load_weights, save_weights, size_of, without_copies
from shardwise.dist.objects import gather_values, same_everywhere
from shardwise.engine import Engine
from shardwise.errors import CommError, ConfigError
from shardwise.messages import logger

MANIFEST = "shardwise_state.json"
FORMAT = 1
NAMED = re.compile(r"checkpoint_(\d+)")
KINDS = "model|optimizer|optimizer_rank|scheduler|loader|custom_checkpoint|scaler|random_states"
OURS = re.compile(rf"({KINDS})[_\d]*\.safetensors")


class Handle:
    """Of a hook; ``remove()`` takes it away."""

    def __init__(self, hooks: list[Any], hook: Any) -> None:
        self._hooks = hooks
        self._hook = hook
        hooks.append(hook)

    def remove(self) -> None:
        """Do not call it any more."""
        if self._hook in self._hooks:
            self._hooks.remove(self._hook)


class Checkpoints(Base):
    """The methods that write and read."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._save_hooks: list[Callable[..., Any]] = []
        self._load_hooks: list[Callable[..., Any]] = []

    @property
    def save_iteration(self) -> int:
        """Number of the next automatic checkpoint."""
        return self.project_configuration.iteration

    @property
    def project_dir(self) -> str | Path | None:
        """Folder of the run."""
        return self.project_configuration.project_dir

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Keep the state of more objects with :meth:`save_state`.

        Raises:
            ConfigError: one has no ``state_dict`` or no ``load_state_dict``; all such are listed.
        """
        bad = [f"Item at index {i}, `{_shown(obj)}`" for i, obj in enumerate(objects) if not _has_state(obj)]
        if bad:
            raise ConfigError(
                "All `objects` must include a `state_dict` and `load_state_dict` function to be stored. The following "
                "inputs are invalid:\n\t- " + "\n\t- ".join(bad)
            )
        self._custom_objects.extend(objects)

    def register_save_state_pre_hook(self, hook: Callable[[list[Any], list[Any], str], None]) -> Handle:
        """Call ``hook(models, weights, folder)`` before a checkpoint is written; what it takes out of the two lists is
        left to it."""
        return Handle(self._save_hooks, hook)

    def register_load_state_pre_hook(self, hook: Callable[[list[Any], str], None]) -> Handle:
        """Call ``hook(models, folder)`` before a checkpoint is read; models that it takes out are left to it."""
        return Handle(self._load_hooks, hook)

    def get_state_dict(self, model: Any, unwrap: bool = True) -> dict[str, Any]:
        """The whole weights of a model, under its own names. All processes must call this.

        Args:
            model: a prepared one, or any.
            unwrap: no effect: names are never those of a wrapper.
        """
        if isinstance(model, Engine):
            state = model.module_state_dict()
            first: dict[int, str] = {}
            for name, param in model.module.named_parameters(remove_duplicate=False):
                owner = first.setdefault(id(param), name)
                if name in state and owner in state:
                    state[name] = state[owner]
            return state
        inner = getattr(model, "_orig_mod", model)
        found: dict[str, Any] = inner.state_dict()
        return found

    def save(self, obj: Any, f: Any, safe_serialization: bool = True) -> None:
        """Write a value, once a run (or once a machine, ``save_on_each_node``).

        Args:
            obj: tensors by name, or numbers, text, tensors, nested.
            f: path; a safetensors file is written.
            safe_serialization: only True: nothing is pickled.
        """
        _only_safe(safe_serialization)
        if not self._writes:
            return
        tensors = isinstance(obj, Mapping) and all(isinstance(v, torch.Tensor) for v in obj.values())
        if tensors:
            kept, same = without_copies({str(k): v for k, v in obj.items()})
            write_tensors(
                Path(f), {k: v.detach().contiguous().cpu() for k, v in kept.items()}, {"format": "pt", **same}
            )
        else:
            write_value(Path(f), obj)

    def save_model(
        self,
        model: Any,
        save_directory: str | Path,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a model's whole weights as ``model.safetensors``, or as parts with an index. All processes must call
        this."""
        _only_safe(safe_serialization)
        folder, limit = Path(save_directory), size_of(max_shard_size)
        if folder.is_file():
            raise ConfigError(f"save_model: {folder} is a file, expected a folder.")
        state = self.get_state_dict(model)
        with together(self.processes, "save_model"):
            if self._writes:
                folder.mkdir(parents=True, exist_ok=True)
                save_weights(state, folder, limit)

    def save_state(
        self, output_dir: str | Path | None = None, safe_serialization: bool = True, **save_model_func_kwargs: Any
    ) -> str:
        """Write everything that this run needs to go on: models, optimizers, schedules, loaders, random states.

        The folder appears when it is whole. All processes must call this, and see the same folder.

        Args:
            output_dir: folder; not with automatic names (:class:`ProjectConfiguration`).
            safe_serialization: only True.
            save_model_func_kwargs: none are known.

        Returns:
            The folder.
        """
        _only_safe(safe_serialization)
        if save_model_func_kwargs:
            raise ConfigError(f"save_state: unknown arguments {', '.join(sorted(save_model_func_kwargs))}.")
        final = self._place(output_dir)
        axis, device = self.processes.axis, self.processes.wire_device()
        if axis.size > 1 and not same_everywhere(axis, str(final.absolute()), device, "save_state"):
            raise ConfigError(f"save_state: the processes gave different folders; this one {final}.")
        aside = final if final.is_dir() else final.with_name(f".{final.name}.partial")
        with together(self.processes, "save_state"):
            if self.processes.is_main_process:
                if aside is not final:
                    shutil.rmtree(aside, ignore_errors=True)
                aside.mkdir(parents=True, exist_ok=True)
                (aside / MANIFEST).unlink(missing_ok=True)  # not whole from here on
                for old in aside.glob("*.safetensors"):
                    if OURS.fullmatch(old.name):
                        old.unlink()  # of more processes, or more objects
        weights = [self.get_state_dict(model) for model in self._models]
        models = list(self._models)
        for hook in list(self._save_hooks):
            hook(models, weights, str(aside))
        with together(self.processes, "save_state"):
            self._write(aside, models, weights)
        with together(self.processes, "save_state"):
            if self.processes.is_main_process:
                write_json(aside / MANIFEST, self._manifest(len(models)))
                if aside is not final:
                    aside.rename(final)
                self._remove_old()
        if self.project_configuration.automatic_checkpoint_naming:
            self.project_configuration.iteration += 1
        if self.processes.is_main_process:
            logger.info("saved the state of the run in %s", final)
        return str(final)

    def load_state(
        self, input_dir: str | Path | None = None, load_kwargs: Any = None, **load_model_func_kwargs: Any
    ) -> None:
        """Go on where :meth:`save_state` was called, with the same objects prepared. All processes must call this.

        Plain runs go on with another number of processes too.

        Args:
            input_dir: folder; default: the newest automatic checkpoint.
            load_kwargs: no effect.
            load_model_func_kwargs: ``strict`` for the weights.

        Raises:
            ConfigError: no checkpoint there, one that is not whole, or one of other objects.
        """
        strict = bool(load_model_func_kwargs.pop("strict", True))
        if load_model_func_kwargs:
            raise ConfigError(f"load_state: unknown arguments {', '.join(sorted(load_model_func_kwargs))}.")
        folder = self._newest() if input_dir is None else Path(input_dir)
        with together(self.processes, "load_state"):
            manifest = self._read_manifest(folder)
        models = list(self._models)
        for hook in list(self._load_hooks):
            hook(models, str(folder))
        with together(self.processes, "load_state"):
            if len(models) != manifest["models"]:
                raise ConfigError(f"{folder}: holds {manifest['models']} models, and {len(models)} are prepared.")
            states = [read_tensors(folder / _numbered("model", i)) for i in range(len(models))]
        for model, (tensors, same) in zip(models, states, strict=True):
            state = {**tensors, **{n: tensors[o] for n, o in same.items() if o in tensors and n not in tensors}}
            load_into(model.module if isinstance(model, Engine) else getattr(model, "_orig_mod", model), state, strict)
        self._read_optimizers(folder)
        with together(self.processes, "load_state"):
            self._read_rest(folder, manifest)
        if self.project_configuration.automatic_checkpoint_naming and (match := NAMED.fullmatch(folder.name)):
            self.project_configuration.iteration = int(match[1]) + 1

    # -- inside --

    @property
    def _writes(self) -> bool:
        each = self.project_configuration.save_on_each_node
        return self.processes.is_local_main_process if each else self.processes.is_main_process

    def _place(self, output_dir: str | Path | None) -> Path:
        named = self.project_configuration.automatic_checkpoint_naming
        if not named:
            if output_dir is None:
                raise ConfigError(
                    "save_state: give it a folder, or ProjectConfiguration(automatic_checkpoint_naming=True)."
                )
            return Path(output_dir)
        if self.project_dir is None:
            raise ConfigError("save_state: automatic names need ProjectConfiguration(project_dir=).")
        place = Path(self.project_dir) / "checkpoints" / f"checkpoint_{self.save_iteration}"
        if place.exists():
            raise ConfigError(
                f"Checkpoint directory {place} ({self.save_iteration}) already exists. Please manually override "
                "`self.save_iteration` with what iteration to start with: load_state() goes on after the newest one."
            )
        return place

    def _newest(self) -> Path:
        if self.project_dir is None or not self.project_configuration.automatic_checkpoint_naming:
            raise ConfigError("load_state: give it a folder; without automatic names there is no newest one.")
        found = _automatic(Path(self.project_dir) / "checkpoints")
        if not found:
            raise ConfigError(f"load_state: there is no checkpoint in {Path(self.project_dir) / 'checkpoints'}.")
        return found[-1]

    def _remove_old(self) -> None:
        config = self.project_configuration
        if config.automatic_checkpoint_naming and config.total_limit is not None and self.project_dir is not None:
            found = _automatic(Path(self.project_dir) / "checkpoints")
            for old in found[: max(0, len(found) - config.total_limit)]:
                shutil.rmtree(old)

    def _manifest(self, models: int) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "processes": self.processes.num_processes,
            "models": models,
            "optimizers": len(self._optimizers),
            "schedulers": len(self._schedulers),
            "loaders": len(self._dataloaders),
            "objects": len(self._custom_objects),
            "step": self.gradient_state.state_dict()["step"],
            "engines": [{"global_steps": e.global_steps, "global_samples": e.global_samples} for e in self._engines],
        }

    def _write(self, folder: Path, models: list[Any], weights: list[Any]) -> None:
        rank = self.processes.process_index
        if self._scale is not None:
            self._scale.settle()
        for i, optimizer in enumerate(self._optimizers):
            if isinstance(optimizer, EngineOptimizer):
                write_value(folder / _numbered(f"optimizer_rank_{rank}", i), optimizer.state_dict())
        write_value(folder / f"random_states_{rank}.safetensors", _random_states())
        if not self.processes.is_main_process:
            return
        for i, state in enumerate(weights):
            kept, same = without_copies(state)
            whole = {k: v.detach().contiguous().cpu() for k, v in kept.items()}
            write_tensors(folder / _numbered("model", i), whole, {"format": "pt", **same})
        for i, optimizer in enumerate(self._optimizers):
            if isinstance(optimizer, AcceleratedOptimizer):
                write_value(folder / _numbered("optimizer", i), optimizer.state_dict())
        for name, objects in self._others().items():
            for i, obj in enumerate(objects):
                write_value(folder / _numbered(name, i), obj.state_dict())
        if self._scale is not None:
            write_value(folder / "scaler.safetensors", self._scale.scaler.state_dict())

    def _others(self) -> dict[str, list[Any]]:
        return {"scheduler": self._schedulers, "loader": self._dataloaders, "custom_checkpoint": self._custom_objects}

    def _read_manifest(self, folder: Path) -> dict[str, Any]:
        if not folder.is_dir():
            raise ConfigError(f"load_state: there is no folder {folder}.")
        path = folder / MANIFEST
        if not path.is_file():
            raise ConfigError(
                f"{folder}: not a checkpoint of shardwise, or one that was not finished ({MANIFEST} is missing)."
            )
        manifest: dict[str, Any] = read_json(path)
        if manifest.get("format") != FORMAT:
            raise ConfigError(f"{path}: format {manifest.get('format')!r}; this version reads {FORMAT}.")
        counted = {
            "optimizers": self._optimizers,
            "schedulers": self._schedulers,
            "loaders": self._dataloaders,
            "objects": self._custom_objects,
        }
        for name, objects in counted.items():
            if manifest[name] != len(objects):
                raise ConfigError(
                    f"{folder}: holds {manifest[name]} {name}, and {len(objects)} are here. Prepare (and register) the "
                    "same objects in the same order before load_state."
                )
        return manifest

    def _read_optimizers(self, folder: Path) -> None:
        rank = self.processes.process_index
        found = []
        with together(self.processes, "load_state"):
            for i, optimizer in enumerate(self._optimizers):
                sharded = isinstance(optimizer, EngineOptimizer)
                found.append(read_value(folder / _numbered(f"optimizer_rank_{rank}" if sharded else "optimizer", i)))
        for optimizer, state in zip(self._optimizers, found, strict=True):
            optimizer.load_state_dict(state)

    def _read_rest(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        for name, objects in self._others().items():
            for i, obj in enumerate(objects):
                obj.load_state_dict(read_value(folder / _numbered(name, i)))
        if self._scale is not None:
            self._scale.scaler.load_state_dict(read_value(folder / "scaler.safetensors"))
        for engine, counters in zip(self._engines, manifest["engines"], strict=True):
            engine.global_steps, engine.global_samples = counters["global_steps"], counters["global_samples"]
        if manifest["step"]:
            logger.warning(
                "%s was saved after %d micro-batches of a window that was not complete; their gradients are not kept.",
                folder,
                manifest["step"],
            )
        path = folder / f"random_states_{self.processes.process_index}.safetensors"
        if path.is_file():
            _set_random_states(read_value(path))
        else:
            logger.warning(
                "%s: has no random states of process %d, for it was saved by %d; they stay what they are.",
                folder,
                self.processes.process_index,
                manifest["processes"],
            )


@contextmanager
def together(processes: Processes, what: str) -> Iterator[None]:
    """What each process does in here has worked on all of them, or an error is raised on all of them.

    Raises:
        CommError: on those where it worked, with the others' errors.
    """
    mine: Exception | None = None
    try:
        yield
    except Exception as error:
        mine = error
    if processes.num_processes > 1:
        text = "" if mine is None else f"{type(mine).__name__}: {mine}"
        told = gather_values(processes.axis, text, processes.wire_device(), what)
        others = "; ".join(f"process {rank}: {problem}" for rank, problem in enumerate(told) if problem)
        if others and mine is None:
            raise CommError(f"{what} failed: {others}")
    if mine is not None:
        raise mine


def _random_states() -> dict[str, Any]:
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "python": [version, list(numbers), gauss],
        "numpy": [kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_random_states(states: Mapping[str, Any]) -> None:
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(states["torch"].cpu())
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"].cpu())


def _automatic(folder: Path) -> list[Path]:
    found = [p for p in folder.iterdir() if NAMED.fullmatch(p.name)] if folder.is_dir() else []
    return sorted(found, key=lambda p: int(p.name.rpartition("_")[2]))


def _numbered(name: str, i: int) -> str:
    return f"{name}.safetensors" if i == 0 else f"{name}_{i}.safetensors"


def _has_state(obj: Any) -> bool:
    return all(callable(getattr(obj, name, None)) for name in ("state_dict", "load_state_dict"))


def _shown(obj: Any) -> str:
    return str(obj) if len(str(obj)) < 80 else type(obj).__name__


def _only_safe(safe_serialization: bool) -> None:
    if not safe_serialization:
        raise ConfigError("safe_serialization=False would write a pickle, which shardwise neither writes nor reads.")


__all__ = ["Checkpoints", "Handle", "load_weights", "together"]
