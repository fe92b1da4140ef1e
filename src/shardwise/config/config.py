"""`Config`: one frozen object for a ds_config, complete and checked."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict, Field

from shardwise.config.auto import Auto
from shardwise.config.batch import Batch, resolve
from shardwise.config.constructors import check_optimizer, check_scheduler
from shardwise.config.cross import check_across, check_world_size
from shardwise.config.fields import Count, Integer, refused
from shardwise.config.later import LATER, Stripper
from shardwise.config.loading import plain, read
from shardwise.config.names import unknown_key
from shardwise.config.problems import Problems, mismatch
from shardwise.config.sections import (
    BATCH_KEYS,
    SECTIONS,
    BF16Section,
    FP16Section,
    OptimizerSection,
    SchedulerSection,
    TopLevel,
    TorchAutocastSection,
    ZeroSection,
)
from shardwise.config.spellings import modernise
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
    zero_optimization: ZeroSection = Field(default_factory=ZeroSection)
    filled: dict[str, Any] = Field(default_factory=dict)
    """What each "auto" became, by JSON path."""
    no_effect: dict[str, Any] = Field(default_factory=dict)
    """Keys, as written, whose capability has not landed and whose value asks for nothing."""

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

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values that `Config.load` accepts and reads as this configuration."""
        values = self.model_dump(exclude={"filled", "no_effect"})
        return _merge(values, self.no_effect)


def _build(
    raw: dict[str, object], world_size: int, auto: Mapping[str, object] | None, problems: Problems
) -> dict[str, Any]:
    """Run the passes over a plain config; report into `problems`, and return what `Config` takes."""
    fill = Auto(auto, problems)
    filled = fill.fill(raw)
    rest, no_effect = Stripper(problems, unknown_key).strip(filled if isinstance(filled, dict) else {}, LATER)
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
    _check_constructors(values, no_effect, problems)
    batch = _resolve_batch(written, world_size, problems)
    check_across(values, world_size, problems)
    fill.report()
    if batch is not None:
        values.update(zip(BATCH_KEYS, (batch.train, batch.micro, batch.gas), strict=True))
        fill.filled.update({name: values[name] for name in fill.batch})
    return {**values, "filled": fill.filled, "no_effect": no_effect}


def _check_constructors(values: dict[str, Any], no_effect: dict[str, object], problems: Problems) -> None:
    if "optimizer" in values:
        values["optimizer"], inert = check_optimizer(values["optimizer"], problems)
        if inert:
            no_effect["optimizer"] = _merge({"params": inert}, no_effect.get("optimizer", {}))
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
