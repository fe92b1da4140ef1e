"""What an engine says while it trains, and what it records."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from shardwise import _torch
from shardwise.dist import Mesh
from shardwise.dist.words import from_first
from shardwise.errors import ConfigError
from shardwise.messages import logger
from shardwise.meter import Meter
from shardwise.monitor import CommLog, Entry, MemoryNotes, Recorder, configured, describe, without_secrets
from shardwise.monitor.comms import COMMUNICATION
from shardwise.monitor.recorder import TOGETHER
from shardwise.optim.sharded import ShardedOptimizer
from shardwise.outcome import StepOutcome
from shardwise.sharding import ShardedModel

if TYPE_CHECKING:
    from shardwise.config import Config
    from shardwise.engine_state import EngineState

# What upstream puts before the name of every value. The x axis is the samples seen by all ranks.
PREFIX = "Train/Samples/"
# With wall_clock_breakdown and no steps_per_print there is a line after so many steps: it was asked for.
STEPS_PER_BREAKDOWN = 10


class Journal:
    """Log lines, trackers, memory, and the cost of communication, as the configuration asks for them.

    Steps need no collective of its own: the mean loss comes with the small all-reduce of the gradient norm.

    Args:
        config: the configuration.
        mesh: whose collectives are watched, if that is asked for.
        sharded, optimizer: whose memory is counted.

    Attributes:
        meter: times and counts; what is added to it appears in the line.
        recorder: gives values to the trackers.
    """

    def __init__(
        self, config: Config, mesh: Mesh, sharded: ShardedModel, optimizer: ShardedOptimizer | None = None
    ) -> None:
        self._config = config
        self._mesh = mesh
        self._device = sharded.device
        self._units = sharded.units
        self._first = mesh.world.position == 0
        self._total = config.scheduler.params.get("total_num_steps") if config.scheduler is not None else None
        self._every = config.steps_per_print
        if self._every is None and config.wall_clock_breakdown:
            self._every = STEPS_PER_BREAKDOWN
        self.meter = Meter(sharded.device, config.wall_clock_breakdown)
        self._memory = MemoryNotes(sharded, optimizer) if config.memory_breakdown and self._first else None
        self.comms: CommLog | None = None
        if config.comms_logger.enabled or config.wall_clock_breakdown:
            self.comms = CommLog(config.comms_logger, self.meter, speaks=self._first)
            for axis in mesh.axes():
                axis.observer = self.comms
        self.recorder = Recorder()
        self._entry: Entry | None = None
        self._outcome: StepOutcome | None = None
        self._printed = self._recorded = self.meter.read()

    def start(self, engine: EngineState) -> None:
        """Begin the run. All ranks must call this.

        Raises:
            ConfigError: a tracker cannot be started; on all ranks.
        """
        if self._config.dump_state and self._first:
            logger.info(describe(engine, self._units))
        self._start_trackers()
        self.reached("initialize")
        self._printed = self._recorded = self.meter.read()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part of a step: timed, and its memory is noted."""
        with self.meter.part(name):
            yield
        self.reached(name)

    def reached(self, point: str) -> None:
        """Note the memory at a point, the first time that it is reached."""
        if self._memory is not None:
            self._memory.note(point)

    def took_step(self, engine: EngineState, outcome: StepOutcome, tokens: float) -> None:
        """The optimizer was stepped, or the step was skipped: which of them may not be known yet.

        Args:
            engine: its counters are those after the step.
            outcome: of the step.
            tokens: of the step, over all ranks; 0 if unknown.
        """
        self.meter.count(engine.train_batch_size(), tokens)
        self._outcome = outcome
        if not self.recorder.enabled or _torch.is_fake(outcome.norm):
            return
        values = {"train_loss": outcome.loss, "grad_norm": outcome.norm}
        self._entry = Entry(engine.global_samples, {PREFIX + n: v for n, v in values.items() if v is not None})
        self.recorder.add(self._entry)

    def settled(self, engine: EngineState) -> None:
        """It is known how the last step went, and the schedule has moved."""
        if self._entry is None:
            return
        known, lrs = {}, engine.get_lr()
        for i, lr in enumerate(lrs):
            if i == 0 or lr != lrs[0]:  # groups with and without decay share one
                known["lr" if i == 0 else f"lr_group{i}"] = lr
        if self._config.fp16.enabled:
            known["loss_scale"] = engine.loss_scale
        self._entry.known.update({PREFIX + name: value for name, value in known.items()})
        self._entry.settled = True

    def end_step(self, engine: EngineState) -> None:
        """After everything else in a step: print and write what is due."""
        prints = self._every is not None and engine.global_steps % self._every == 0
        if self._entry is not None and (prints or engine.global_steps % TOGETHER == 0):
            self._entry.known.update({PREFIX + name: value for name, value in self._rates().items()})
        if prints:
            engine.settle()  # on every rank: it is how all of them learn of a skipped step
            if self._first and self._outcome is not None and not _torch.is_fake(self._outcome.norm):
                logger.info(self._line(engine, self._outcome))
            self.recorder.flush()
        else:
            self.recorder.tick()

    def close(self) -> None:
        """Write what is left, and say what communication cost."""
        for axis in self._mesh.axes():
            axis.observer = None
        if self.comms is not None:
            self.comms.close()
        self.recorder.close()

    def _start_trackers(self) -> None:
        sections = (self._config.tensorboard, self._config.csv_monitor, self._config.wandb, self._config.comet)
        if not any(section.enabled for section in sections):
            return
        error: ConfigError | None = None
        if self._first:
            recorded = {**without_secrets(self._config.as_dict()), "world_size": self._mesh.world.size}
            try:
                self.recorder.start(configured(self._config), recorded)
            except ConfigError as failed:
                error = failed
        said = from_first(self._mesh.world, "" if error is None else str(error), self._device, "start of the trackers")
        if error is not None:
            raise error
        if said:
            raise ConfigError(f"rank 0 could not start a tracker: {said}")

    def _rates(self) -> dict[str, float]:
        """Throughput, memory and times since they were last recorded."""
        now = self.meter.read()
        lap, self._recorded = now.since(self._recorded), now
        rates = {"memory_gib": self.meter.memory() / 2**30}
        if self._config.timers.throughput.enabled:
            rates["samples_per_second"] = lap.samples / lap.seconds
            if lap.tokens:
                rates["tokens_per_second"] = lap.tokens / lap.seconds
        rates.update({f"elapsed_time_ms_{name.replace(' ', '_')}": lap.part(name) for name in lap.spent})
        return rates

    def _line(self, engine: EngineState, outcome: StepOutcome) -> str:
        throughput = self._config.timers.throughput
        now = self.meter.read(wait=self.meter.breakdown or (throughput.enabled and throughput.synchronized))
        lap, self._printed = now.since(self._printed), now
        parts = [f"step {engine.global_steps}"]
        if outcome.loss is not None:
            parts.append(f"loss {float(outcome.loss):.4f}")
        norm, clip = float(outcome.norm), self._config.gradient_clipping
        clipped = f" (clipped to {clip:g})" if 0 < clip < norm and engine.was_step_applied() else ""
        parts.append(f"norm {norm:.3f}{clipped}")
        parts.append("lr " + ", ".join(f"{lr:.3g}" for lr in dict.fromkeys(engine.get_lr())))
        if self._config.fp16.enabled:
            parts.append(f"loss scale {engine.loss_scale:g}")
        if engine.skipped_steps:
            parts.append(f"skipped {engine.skipped_steps}")
        if throughput.enabled and lap.tokens:
            parts.append(f"{lap.tokens / lap.seconds:,.0f} tokens/s")
        elif throughput.enabled:
            parts.append(f"{lap.samples / lap.seconds:,.1f} samples/s")
        each = lap.seconds / max(lap.steps, 1)
        parts.append(f"{each * 1e3:,.0f} ms/step")
        parts.append(f"mem {self.meter.memory() / 2**30:.2f} GiB")
        if self._total is not None and self._total > engine.global_steps:
            parts.append(f"left {timedelta(seconds=round((self._total - engine.global_steps) * each))}")
        parts += [f"{name} {lap.part(name):,.0f} ms" for name in lap.spent if name != COMMUNICATION]
        if COMMUNICATION in lap.spent:
            parts.append(f"of which waiting for communication {lap.part(COMMUNICATION):,.0f} ms")
        return " | ".join(parts)
