"""`prepare`, and the way back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from shardwise.accelerator.base import Base
from shardwise.accelerator.deepspeed import DummyOptim, DummyScheduler
from shardwise.accelerator.engines import Facts, build, resolve
from shardwise.accelerator.forward import LowPrecisionEngine, remove_low_precision
from shardwise.accelerator.loaders import prepare_data_loader
from shardwise.accelerator.memory import release_memory
from shardwise.accelerator.nested import send_to_device
from shardwise.accelerator.optimizer import AcceleratedOptimizer, EngineOptimizer
from shardwise.accelerator.plain import PlainModel, mark
from shardwise.accelerator.scheduler import AcceleratedScheduler, EngineScheduler
from shardwise.accelerator.together import Together
from shardwise.engine import Engine
from shardwise.errors import ConfigError, NotYetSupported
from shardwise.precision import model_dtype
from shardwise.sharding.replicas import replicas_of
from shardwise.sharding.turns import Turns

WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)


class Preparing(Together, Base):
    """The methods that take a script's objects in, and give them back."""

    def prepare(self, *args: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Make models, optimizers, schedules and loaders fit for this run. All processes must call this alike.

        Args:
            args: objects in any order; what is none of these is handed through.
            device_placement: for each, whether it is moved to the device; default: ``self.device_placement``.

        Returns:
            The prepared objects in the same order; one alone if one was given.

        Raises:
            ConfigError: what was given does not fit together, or the ds_config.
        """
        if not self._state.initialized:
            self._state.processes  # raises what says so  # noqa: B018
        places = [None] * len(args) if device_placement is None else list(device_placement)
        if len(places) != len(args):
            raise ConfigError(f"device_placement: {len(places)} values for {len(args)} objects.")
        found: dict[int, Any] = {}
        if self.deepspeed_plugin is not None:
            if device_placement is not None:
                raise ConfigError("device_placement: a ds_config's engine places its model itself; leave this out.")
            found = self._prepare_engines(args)
        out = [found.get(i, item) for i, item in enumerate(args)]
        # Optimizers before schedules, which refer to them.
        for kind in (DataLoader, nn.Module, Optimizer, (LRScheduler, AcceleratedScheduler)):
            for i, item in enumerate(args):
                if i not in found and isinstance(item, kind):
                    out[i] = self._prepare_one(item, places[i])
        return out[0] if len(out) == 1 else tuple(out)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Make a model fit for this run; one that is prepared already is returned as it is.

        Args:
            model: the model.
            device_placement: whether it is moved to the device.
            evaluation_mode: it is not trained: no gradients are averaged, and it is not sharded.
        """
        if id(model) in self._plain or isinstance(model, Engine):
            return model
        known = replicas_of(model)
        if known is not None and not evaluation_mode:
            # Agreed on, for garbage is not collected at the same moment everywhere.
            if self._anywhere(known.owner is not None and known.owner() is not None):
                raise ConfigError(
                    "prepare: this model is prepared by another Accelerator, so its gradients would be averaged twice. "
                    "Call free_memory() of that one first, or go on with it."
                )
            known.close()  # of an Accelerator that is gone, and its group with it
            known.axis.close()
        remove_low_precision(model)  # likewise
        if self.deepspeed_plugin is not None and not evaluation_mode:
            return self._prepare_engines((model,))[0]
        place = self.device_placement if device_placement is None else device_placement
        dynamo = self._state.dynamo_plugin
        prepared: Any = model
        if dynamo.active and not dynamo.use_regional_compilation:
            # First, so that what is hooked stands outside of the compiled code.
            prepared = torch.compile(model, backend=dynamo.backend.lower(), **dynamo.kwargs())
        record = PlainModel(
            prepared,
            self.processes,
            precision=self.mixed_precision,
            handlers=self.handlers,
            place=place,
            axis=self.gradient_axis if self.use_distributed and not evaluation_mode else None,
            first_tag=self._next_tag,
            owner=self,
            turns=self._turns,
            outputs_in_fp32=self._outputs_in_fp32,
        )
        self._next_tag += record.tags
        if dynamo.active and dynamo.use_regional_compilation:
            record.compile_blocks(dynamo.backend.lower(), dynamo.kwargs())
        self._plain[id(prepared)] = record
        self._models.append(prepared)
        return prepared

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Any:
        """Make an optimizer act when windows are complete.

        Raises:
            ConfigError: with a ds_config, where it must be prepared together with its model.
        """
        if isinstance(optimizer, AcceleratedOptimizer) and optimizer.gradient_state is not self.gradient_state:
            optimizer = optimizer.optimizer  # another Accelerator's windows are not ours
        if getattr(optimizer, "_is_accelerate_prepared", False):
            if optimizer not in self._optimizers:
                self._optimizers.append(optimizer)
            return optimizer
        if self.deepspeed_plugin is not None:
            raise ConfigError(
                f"prepare: {type(optimizer).__name__} trains no model of this call. With a ds_config an optimizer and "
                "its model are prepared in one call: model, optimizer = accelerator.prepare(model, optimizer)."
            )
        place = self.device_placement if device_placement is None else device_placement
        if place:
            for state in optimizer.state.values():
                for key, value in state.items():
                    # A step count stays where the optimizer has put it.
                    if key != "step" and isinstance(value, torch.Tensor):
                        state[key] = value.to(self.device)
        prepared = AcceleratedOptimizer(
            optimizer, self.gradient_state, scales=self._scales, weighting=self._weighting, once=self._once
        )
        self._optimizers.append(prepared)
        self._unchecked = True
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Make a schedule advance when its optimizer stepped."""
        if isinstance(scheduler, AcceleratedScheduler) and scheduler.gradient_state is not self.gradient_state:
            scheduler = scheduler.scheduler  # of another Accelerator
        if getattr(scheduler, "_is_accelerate_prepared", False):
            if all(scheduler is not known for known in self._schedulers):
                self._schedulers.append(scheduler)
            return scheduler
        trained = getattr(scheduler, "optimizer", None)
        own = [o for o in self._optimizers if trained is not None and (_inner(o) is trained or o is trained)]
        once = self._step_scheduler == "update" or self.dataloader_config.split_batches
        prepared = AcceleratedScheduler(
            scheduler,
            own or self._optimizers,
            self.gradient_state,
            advances=1 if once else self.processes.num_processes,
            with_optimizer=self.step_scheduler_with_optimizer,
            each_micro_batch=self._accumulation.adjust_scheduler,
        )
        if prepared.advances > 1 and self.step_scheduler_with_optimizer:
            self._once.info(
                f"schedules advance {prepared.advances} times for each update, once for each process, as they do in "
                "Accelerate; Accelerator(step_scheduler='update') advances them once."
            )
        self._schedulers.append(prepared)
        return prepared

    def prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Make a loader give this process its part of each epoch, on the device."""
        if getattr(data_loader, "_is_accelerate_prepared", False):
            loader: Any = data_loader
            loader.watched_by(self.gradient_state)
            if all(loader is not known for known in self._dataloaders):
                self._dataloaders.append(loader)
            return loader
        place = self.device_placement if device_placement is None else device_placement
        config = self.dataloader_config
        prepared = prepare_data_loader(
            data_loader,
            self.device,
            put_on_device=place,
            split_batches=config.split_batches,
            rng_types=self.rng_types,
            dispatch_batches=config.dispatch_batches,
            even_batches=config.even_batches,
            slice_fn_for_dispatch=slice_fn_for_dispatch,
            use_seedable_sampler=config.use_seedable_sampler,
            data_seed=config.data_seed,
            non_blocking=config.non_blocking,
            use_stateful_dataloader=config.use_stateful_dataloader,
            loops=self.gradient_state,
            processes=self.processes,
        )
        mark(prepared, True)
        self._dataloaders.append(prepared)
        return prepared

    def unwrap_model(self, model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """The script's own model.

        Args:
            model: a prepared one, or any.
            keep_fp32_wrapper: False: its forward runs in its own precision again.
            keep_torch_compile: leave a compiled model compiled.
        """
        record = self._plain.get(id(model))
        if record is not None and not keep_fp32_wrapper:
            record.without_precision()
        compiled = hasattr(model, "_orig_mod")
        inner = model._orig_mod if compiled else model
        while isinstance(inner, (*WRAPPERS, Engine)):
            inner = inner.module
        return model if compiled and keep_torch_compile and inner is model._orig_mod else inner

    def free_memory(self, *objects: Any) -> Any:
        """Forget everything that was prepared, and free what it held: ``model, opt = accelerator.free_memory(model,
        opt)``. Models are ordinary again. All processes must call this."""
        for record in self._plain.values():
            record.close()
        for engine in self._every_engine():
            engine.destroy()
        for kept in (self._plain, self._models, self._optimizers, self._schedulers, self._dataloaders, self._engines):
            kept.clear()
        self._evaluated.clear()
        if self._mesh is not None:
            self._mesh.close()
            self._mesh = None
        self._turns = Turns()
        self.gradient_state.reset()
        return release_memory(*objects)

    def clear(self, *objects: Any) -> Any:
        """As :meth:`free_memory`."""
        return self.free_memory(*objects)

    def verify_device_map(self, model: nn.Module) -> bool:
        """Whether a model is spread over several devices."""
        return any(len(set(getattr(m, "hf_device_map", {}).values())) > 1 for m in model.modules())

    # -- inside --

    def _prepare_one(self, item: Any, place: bool | None) -> Any:
        if isinstance(item, DataLoader):
            return self.prepare_data_loader(item, device_placement=place)
        if isinstance(item, nn.Module):
            return self.prepare_model(item, device_placement=place)
        if isinstance(item, Optimizer):
            return self.prepare_optimizer(item, device_placement=place)
        return self.prepare_scheduler(item)

    def _prepare_engines(self, args: Sequence[Any]) -> dict[int, Any]:
        """The engines of the models among ``args``, and the faces of their optimizers and schedules, by position."""
        plugin = self.deepspeed_plugin
        models = [i for i, a in enumerate(args) if isinstance(a, nn.Module) and not isinstance(a, Engine)]
        optimizers = [i for i, a in enumerate(args) if isinstance(a, Optimizer | DummyOptim)]
        optimizers = [i for i in optimizers if not getattr(args[i], "_is_accelerate_prepared", False)]
        schedulers = [i for i, a in enumerate(args) if isinstance(a, LRScheduler | DummyScheduler)]
        sizes = [self._size_as_given(a) for a in args if isinstance(a, DataLoader)]
        found: dict[int, Any] = {}
        for i in models:
            mine = [j for j in optimizers if j not in found and _trains(args[j], args[i])]
            if len(mine) > 1:
                raise NotYetSupported("prepare: one model with two optimizers and a ds_config has not landed.")
            optimizer = args[mine[0]] if mine else None
            own = [k for k in schedulers if optimizer is not None and getattr(args[k], "optimizer", None) is optimizer]
            if len(models) == 1 and not own:
                own = [k for k in schedulers if isinstance(args[k], DummyScheduler)]
            scheduler = args[own[0]] if own else None
            facts = Facts(
                self.gradient_state.num_steps,
                self.gradient_normalization,
                self.mixed_precision,
                self.processes.num_processes,
                self.dataloader_config.split_batches,
            )
            if plugin is None:
                raise ConfigError("prepare: there is no ds_config.")
            config, auto = resolve(plugin, facts, optimizer, scheduler, sizes)
            engine = self._compiled(build(args[i], optimizer, scheduler, config, auto))
            found[i] = engine
            self._take_over(engine, optimizer is not None)
            if engine.optimizer is not None:
                # Without one in the script, that of the ds_config steps in `backward`.
                face = EngineOptimizer(engine, self.gradient_state, steps_itself=not mine)
                found.update({k: face for k in mine})
                self._optimizers.append(face)
            if engine.lr_scheduler is not None:
                schedule = EngineScheduler(engine.lr_scheduler)
                found.update({k: schedule for k in own})
                self._schedulers.append(schedule)
        return found

    def _anywhere(self, flag: bool) -> bool:
        found = torch.tensor([float(flag)], device=self.processes.wire_device())
        self.processes.axis.max_small(found, "prepare")
        return bool(found.item())

    def _size_as_given(self, loader: Any) -> int | None:
        """The batch size of a loader as the script wrote it; a prepared one knows it of all processes together."""
        if not getattr(loader, "_is_accelerate_prepared", False):
            size: int | None = loader.batch_size
            return size
        total: int | None = loader.total_batch_size
        shares = 1 if self.dataloader_config.split_batches else self.processes.num_processes
        return None if total is None else total // shares

    def _compiled(self, engine: Engine) -> Engine:
        dynamo = self._state.dynamo_plugin
        if dynamo.active:
            engine.compile(dynamo.backend.lower(), dynamo.kwargs())
        return engine

    def _take_over(self, engine: Engine, trained: bool) -> None:
        mark(engine, True)
        self._models.append(engine)
        dtype = model_dtype(engine.config)
        if dtype is not None:
            LowPrecisionEngine(engine, dtype, outputs_in_fp32=self._outputs_in_fp32)
        trained = trained or engine.optimizer is not None
        if not trained:
            self._evaluated.append(engine)
            return
        if self._engines and (engine.config.fp16.enabled or self.gradient_normalization != "micro_steps"):
            raise NotYetSupported(
                "prepare: two models with fp16 or with weights of their own in one run have not landed."
            )
        self._engines.append(engine)
        steps = engine.gradient_accumulation_steps()
        if steps != self.gradient_state.num_steps:
            self._once.warn(
                f"gradient_accumulation_steps: the ds_config says {steps}, the Accelerator "
                f"{self.gradient_state.num_steps}; that of the ds_config counts."
            )
            self.gradient_state.num_steps = steps

    def _every_engine(self) -> list[Engine]:
        return [*self._engines, *self._evaluated]

    def to_device(self, batch: Any) -> Any:
        """A batch on this process's device."""
        return send_to_device(batch, self.device)


def _inner(optimizer: Any) -> Any:
    inner = optimizer.optimizer
    return getattr(inner, "optimizer", inner) if isinstance(optimizer, EngineOptimizer) else inner


def _trains(optimizer: Any, model: nn.Module) -> bool:
    held = {id(p) for p in model.parameters()}
    groups = optimizer.params if isinstance(optimizer, DummyOptim) else optimizer.param_groups
    groups = list(groups) if not isinstance(groups, list) else groups
    if isinstance(optimizer, DummyOptim):
        optimizer.params = groups  # a generator can be read once only
    for group in groups:
        params = group["params"] if isinstance(group, dict) else [group]
        if any(id(p) in held for p in params):
            return True
    return False
