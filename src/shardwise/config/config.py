"""`Config`: one frozen object for a ds_config, complete and checked."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ConfigDict, Field

from shardwise.config.auto import Auto
from shardwise.config.batch import Batch, resolve
from shardwise.config.constructors import check_optimizer, check_scheduler
from shardwise.config.cross import check_across, check_world_size
from shardwise.config.fields import Count, Integer, refused
from shardwise.config.loading import plain, read
from shardwise.config.names import unknown_key
from shardwise.config.optimizers import clipping
from shardwise.config.problems import Path, Problems, format_path, mismatch
from shardwise.config.sections import (
    BATCH_KEYS,
    SECTIONS,
    ActivationCheckpointingSection,
    BF16Section,
    CometSection,
    CommsLoggerSection,
    CompileSection,
    CSVMonitorSection,
    DataTypesSection,
    FlashAttentionSection,
    FP16Section,
    OptimizerSection,
    SchedulerSection,
    TensorBoardSection,
    TimersSection,
    TopLevel,
    TorchAutocastSection,
    WandbSection,
    ZeroSection,
)
from shardwise.config.spellings import modernise
from shardwise.config.table import TABLE, Stripper
from shardwise.config.validate import validate
from shardwise.errors import ConfigError


class Config(TopLevel):
    """A ds_config with every value present and checked; attributes carry the names of the JSON keys.

    Made by `Config.load`. Sizes are in elements, timeouts in seconds, batch sizes in samples.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    train_batch_size: Count
    train_micro_batch_size_per_gpu: Count
    gradient_accumulation_steps: Count
    optimizer: OptimizerSection | None = None
    scheduler: SchedulerSection | None = None
    fp16: FP16Section = Field(default_factory=FP16Section)
    bf16: BF16Section = Field(default_factory=BF16Section)
    torch_autocast: TorchAutocastSection = Field(default_factory=TorchAutocastSection)
    data_types: DataTypesSection = Field(default_factory=DataTypesSection)
    zero_optimization: ZeroSection = Field(default_factory=ZeroSection)
    activation_checkpointing: ActivationCheckpointingSection = Field(default_factory=ActivationCheckpointingSection)
    flashattention: FlashAttentionSection = Field(default_factory=FlashAttentionSection)
    compile: CompileSection = Field(default_factory=CompileSection)
    tensorboard: TensorBoardSection = Field(default_factory=TensorBoardSection)
    csv_monitor: CSVMonitorSection = Field(default_factory=CSVMonitorSection)
    wandb: WandbSection = Field(default_factory=WandbSection)
    comet: CometSection = Field(default_factory=CometSection)
    comms_logger: CommsLoggerSection = Field(default_factory=CommsLoggerSection)
    timers: TimersSection = Field(default_factory=TimersSection)
    filled: dict[str, Any] = Field(default_factory=dict)
    """What each "auto" became, by JSON path."""
    no_effect: dict[str, Any] = Field(default_factory=dict)
    """Keys, as written, that are not honoured and whose value asks for nothing, or has no effect."""
    written: frozenset[str] = Field(default_factory=frozenset, repr=False)
    """The JSON paths of the values that the source holds."""

    @classmethod
    def load(
        cls,
        source: str | os.PathLike[str] | Mapping[str, Any],
        *,
        world_size: int = 1,
        auto: Mapping[str, object] | None = None,
    ) -> Config:
        """Read and check a ds_config.

        Args:
            source: path of a JSON file (comments and trailing commas allowed), a mapping (never modified), or
                the urlsafe base64 of a JSON text.
            world_size: number of data-parallel ranks, for the batch identity and the hybrid-sharding groups.
            auto: what to fill in where the config says "auto", by JSON path, as in
                `{"optimizer.params.lr": 1e-4}`.

        Returns:
            The configuration, with the three batch keys resolved.

        Raises:
            ConfigError: the source cannot be read, or holds something wrong; the message lists every problem
                with its JSON path.
            NotYetSupported: all that is wrong is that keys ask for capabilities that have not landed.
        """
        data, name = read(source)
        if not isinstance(data, Mapping):
            raise ConfigError(f"{name}: {mismatch(data, 'an object {...}')}")
        check_world_size(world_size)
        problems = Problems()
        values = _build(modernise(plain(data, (), problems), problems), world_size, auto, problems)
        problems.raise_if_any(name)
        for message in problems.warnings:
            warnings.warn(message, UserWarning, stacklevel=2)
        return cls(**values)

    def __eq__(self, other: object) -> bool:
        """Whether both mean the same; which values were written out does not count."""
        if not isinstance(other, Config):
            return NotImplemented
        return self.model_dump(exclude={"written"}) == other.model_dump(exclude={"written"})

    __hash__ = None  # type: ignore[assignment]

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values that `Config.load` accepts and reads as this configuration."""
        values = self.model_dump(exclude={"filled", "no_effect", "written"})
        return _merge(values, self.no_effect)


def _build(
    raw: dict[str, object], world_size: int, auto: Mapping[str, object] | None, problems: Problems
) -> dict[str, Any]:
    """Run the passes over a plain config; report into `problems`, and return what `Config` takes."""
    written_paths = frozenset(format_path(path) for path in _leaves(raw))
    fill = Auto(auto, problems)
    filled = fill.fill(raw)
    rest, no_effect = Stripper(problems, unknown_key).strip(filled if isinstance(filled, dict) else {}, TABLE)
    written = {name: rest.pop(name) for name in BATCH_KEYS if rest.get(name) is not None}
    values: dict[str, Any] = {}
    for name, model in SECTIONS.items():
        value = rest.pop(name, None)
        section = None if value is None else validate(model, value, (name,), problems)
        if section is not None:
            values[name] = section
    scalars = {key: item for key, item in rest.items() if key not in BATCH_KEYS}
    top = validate(TopLevel, scalars, (), problems) or TopLevel()
    values.update({name: getattr(top, name) for name in TopLevel.model_fields})
    _check_constructors(values, scalars.get("gradient_clipping"), problems)
    batch = _resolve_batch(written, world_size, problems)
    check_across(values, world_size, problems)
    fill.report()
    if batch is not None:
        values.update(zip(BATCH_KEYS, (batch.train, batch.micro, batch.gas), strict=True))
        fill.filled.update({name: values[name] for name in fill.batch})
    return {**values, "filled": fill.filled, "no_effect": no_effect, "written": written_paths}


def _leaves(value: object, path: Path = ()) -> Iterator[Path]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, (*path, str(key)))
    elif value is not None:
        yield path


def _check_constructors(values: dict[str, Any], clip_norm: object, problems: Problems) -> None:
    if "optimizer" in values:
        section = values["optimizer"] = check_optimizer(values["optimizer"], problems)
        values["gradient_clipping"] = clipping(section.params, clip_norm, values["gradient_clipping"], problems)
    if "scheduler" in values:
        values["scheduler"] = check_scheduler(values["scheduler"], problems)


def _resolve_batch(written: dict[str, object], world_size: int, problems: Problems) -> Batch | None:
    given: dict[str, int] = {}
    for name, value in written.items():
        message = refused(Integer(1), value)
        if message is None:
            given[name] = Integer(1)(value)
        else:
            problems.add((name,), message)
    if problems.touches(*((name,) for name in BATCH_KEYS)):
        return None
    return resolve(given, world_size, problems)


def _merge(first: dict[str, Any], second: object) -> dict[str, Any]:
    """Merge two nested objects that share no leaf."""
    result = dict(first)
    for key, value in second.items() if isinstance(second, dict) else ():
        known = result.get(key)
        result[key] = _merge(known, value) if isinstance(known, dict) else value
    return result
