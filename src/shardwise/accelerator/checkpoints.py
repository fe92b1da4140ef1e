"""`save_state` and `load_state`: everything that a run needs to go on."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardwise.accelerator.files import read_json, read_tensors, read_value, write_json, write_tensors, write_value
from shardwise.accelerator.folders import (
    MANIFEST,
    NAMED,
    aside_name,
    automatic,
    begin,
    commit,
    give_up,
    numbered,
    recover,
)
from shardwise.accelerator.optimizer import AcceleratedOptimizer, EngineOptimizer
from shardwise.accelerator.random_states import random_states, set_random_states
from shardwise.accelerator.saving import Saving, only_safe, together
from shardwise.accelerator.weights import load_into, without_copies
from shardwise.dist.objects import same_everywhere
from shardwise.engine import Engine
from shardwise.errors import ConfigError
from shardwise.messages import logger

FORMAT = 1
KEYS = {"processes", "models", "optimizers", "schedulers", "loaders", "objects", "step", "engines"}


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


class Checkpoints(Saving):
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
        only_safe(safe_serialization)
        if save_model_func_kwargs:
            raise ConfigError(f"save_state: unknown arguments {', '.join(sorted(save_model_func_kwargs))}.")
        with together(self.processes, "save_state"):
            final = self._place(output_dir)
        axis, device = self.processes.axis, self.processes.wire_device()
        if axis.size > 1 and not same_everywhere(axis, str(final.absolute()), device, "save_state"):
            raise ConfigError(f"save_state: the processes gave different folders; this one {final}.")
        aside = final.absolute().with_name(aside_name(final))
        with together(self.processes, "save_state"):
            if self.processes.is_main_process:
                try:
                    begin(final)
                except OSError as error:
                    raise ConfigError(f"save_state: {final} cannot be written ({error}).") from error
        try:
            weights = [self.get_state_dict(model) for model in self._models]
            models = list(self._models)
            with together(self.processes, "save_state"):
                for hook in list(self._save_hooks):
                    hook(models, weights, str(aside))
            with together(self.processes, "save_state"):
                self._write(aside, models, weights)
            with together(self.processes, "save_state"):
                if self.processes.is_main_process:
                    write_json(aside / MANIFEST, self._manifest(len(weights)))
                    commit(final)
                    self._remove_old()
        except Exception:
            if self.processes.is_main_process:
                give_up(final)
            raise
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
        with together(self.processes, "load_state"):
            folder = self._newest() if input_dir is None else Path(input_dir)
            if self.processes.is_main_process:
                recover(folder)
        with together(self.processes, "load_state"):
            manifest = self._read_manifest(folder)
        models = list(self._models)
        with together(self.processes, "load_state"):
            for hook in list(self._load_hooks):
                hook(models, str(folder))
        with together(self.processes, "load_state"):
            if len(models) != manifest["models"]:
                raise ConfigError(f"{folder}: holds {manifest['models']} models, and {len(models)} are prepared.")
            # All is read before anything is changed.
            weights = [read_tensors(folder / numbered("model", i)) for i in range(len(models))]
            optimizers = self._read_optimizers(folder)
            others = self._read_others(folder)
        with together(self.processes, "load_state"):
            for model, (tensors, same) in zip(models, weights, strict=True):
                state = {**tensors, **{n: tensors[o] for n, o in same.items() if o in tensors and n not in tensors}}
                inner = model.module if isinstance(model, Engine) else getattr(model, "_orig_mod", model)
                load_into(inner, state, strict)
            for optimizer, state in zip(self._optimizers, optimizers, strict=True):
                optimizer.load_state_dict(state)
            self._go_on(folder, manifest, others)
        if self.project_configuration.automatic_checkpoint_naming and (match := NAMED.fullmatch(folder.name)):
            self.project_configuration.iteration = int(match[1]) + 1

    # -- inside --

    def _place(self, output_dir: str | Path | None) -> Path:
        named = self.project_configuration.automatic_checkpoint_naming
        if not named:
            if output_dir is not None and Path(output_dir).is_file():
                raise ConfigError(f"save_state: {output_dir} is a file, expected a folder.")
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
        found = automatic(Path(self.project_dir) / "checkpoints")
        if not found:
            raise ConfigError(f"load_state: there is no checkpoint in {Path(self.project_dir) / 'checkpoints'}.")
        return found[-1]

    def _remove_old(self) -> None:
        config = self.project_configuration
        if config.automatic_checkpoint_naming and config.total_limit is not None and self.project_dir is not None:
            found = automatic(Path(self.project_dir) / "checkpoints")
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
            "engines": [
                {
                    "stage": engine.zero_optimization_stage(),
                    "global_steps": engine.global_steps,
                    "global_samples": engine.global_samples,
                }
                for engine in self._engines
            ],
        }

    def _write(self, folder: Path, models: list[Any], weights: list[Any]) -> None:
        rank = self.processes.process_index
        for i, optimizer in enumerate(self._optimizers):
            if isinstance(optimizer, EngineOptimizer):
                write_value(folder / numbered(f"optimizer_rank_{rank}", i), optimizer.state_dict())
        write_value(folder / f"random_states_{rank}.safetensors", random_states())
        if not self.processes.is_main_process:
            return
        for i, state in enumerate(weights):
            kept, same = without_copies(state)
            whole = {k: v.detach().contiguous().cpu() for k, v in kept.items()}
            write_tensors(folder / numbered("model", i), whole, {"format": "pt", **same})
        for i, optimizer in enumerate(self._optimizers):
            if isinstance(optimizer, AcceleratedOptimizer):
                write_value(folder / numbered("optimizer", i), optimizer.state_dict())
        for name, objects in self._others().items():
            for i, obj in enumerate(objects):
                write_value(folder / numbered(name, i), obj.state_dict())
        if self._scales is not None:
            write_value(folder / "scaler.safetensors", self._scales.state_dict(self.gradient_state.windows))

    def _others(self) -> dict[str, list[Any]]:
        return {"scheduler": self._schedulers, "loader": self._dataloaders, "custom_checkpoint": self._custom_objects}

    def _read_manifest(self, folder: Path) -> dict[str, Any]:
        if not folder.is_dir():
            raise ConfigError(f"load_state: there is no folder {folder}.")
        path = folder / MANIFEST
        if not path.is_file() and (any(folder.glob("*.pkl")) or any(folder.glob("*.bin"))):
            raise ConfigError(
                f"{folder}: was written by Accelerate. What it holds beside the weights are pickles, which are not "
                "opened: load the weights with shardwise.load_checkpoint_in_model(model, folder), and begin anew."
            )
        if not path.is_file():
            raise ConfigError(
                f"{folder}: not a checkpoint of shardwise, or one that was not finished ({MANIFEST} is missing)."
            )
        manifest: dict[str, Any] = read_json(path)
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            written = manifest.get("format") if isinstance(manifest, dict) else None
            raise ConfigError(f"{path}: format {written!r}; this version reads {FORMAT}.")
        if not isinstance(manifest.get("engines"), list) or not all(isinstance(e, dict) for e in manifest["engines"]):
            raise ConfigError(f"{path}: engines: expected a list of objects.")
        missing = KEYS - set(manifest)
        if missing:
            raise ConfigError(f"{path}: {', '.join(sorted(missing))}: missing, so it was not written by shardwise.")
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
        self._check_kind(folder, manifest)
        return manifest

    def _check_kind(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        """Whether this run is sharded as the one that wrote was."""

        def shown(stages: list[int], processes: int) -> str:
            kind = f"a ds_config of stage {', '.join(map(str, stages))}" if stages else "no ds_config"
            return f"{kind} on {processes} process{'es' if processes > 1 else ''}"

        wrote = [engine["stage"] for engine in manifest["engines"]]
        here = [engine.zero_optimization_stage() for engine in self._engines]
        if wrote == here and (not here or manifest["processes"] == self.processes.num_processes):
            return
        raise ConfigError(
            f"{folder}: was saved with {shown(wrote, manifest['processes'])}, and this run has "
            f"{shown(here, self.processes.num_processes)}. The state of an optimizer over a sharded model opens where "
            "it was written for now: resume with the same stage and number of processes. The weights alone open "
            "anywhere: they are in model.safetensors."
        )

    def _read_optimizers(self, folder: Path) -> list[dict[str, Any]]:
        kinds = [isinstance(optimizer, EngineOptimizer) for optimizer in self._optimizers]
        names = {True: f"optimizer_rank_{self.processes.process_index}", False: "optimizer"}
        return [read_value(folder / numbered(names[sharded], i)) for i, sharded in enumerate(kinds)]

    def _read_others(self, folder: Path) -> dict[str, list[Any]]:
        found = {
            name: [read_value(folder / numbered(name, i)) for i in range(len(objects))]
            for name, objects in self._others().items()
        }
        if self._scales is not None:
            found["scaler"] = [read_value(folder / "scaler.safetensors")]
        path = folder / f"random_states_{self.processes.process_index}.safetensors"
        found["random_states"] = [read_value(path)] if path.is_file() else []
        return found

    def _go_on(self, folder: Path, manifest: Mapping[str, Any], found: Mapping[str, list[Any]]) -> None:
        for name, objects in self._others().items():
            for obj, state in zip(objects, found[name], strict=True):
                obj.load_state_dict(state)
        if self._scales is not None:
            self._scales.load_state_dict(found["scaler"][0], self.gradient_state.windows)
        for loader in self._dataloaders:
            state = loader.state_dict()
            if state["batches"]:
                self._once.info(
                    f"a loader goes on after {state['batches']} batches of epoch {state['epoch']}: do not skip them by "
                    "hand once more (skip_first_batches counts from the start of the epoch, and changes nothing)."
                )
        for engine, counters in zip(self._engines, manifest["engines"], strict=True):
            engine.global_steps, engine.global_samples = counters["global_steps"], counters["global_samples"]
        if manifest["step"]:
            logger.warning(
                "%s was saved after %d micro-batches of a window that was not complete; their gradients are not kept.",
                folder,
                manifest["step"],
            )
        if found["random_states"]:
            set_random_states(found["random_states"][0])
        else:
            logger.warning(
                "%s: has no random states of process %d, for it was saved by %d; they stay what they are.",
                folder,
                self.processes.process_index,
                manifest["processes"],
            )


def _has_state(obj: Any) -> bool:
    return all(callable(getattr(obj, name, None)) for name in ("state_dict", "load_state_dict"))


def _shown(obj: Any) -> str:
    return str(obj) if len(str(obj)) < 80 else type(obj).__name__
