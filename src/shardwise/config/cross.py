"""What two sections, or a section and the world size, must agree on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.config.fields import Integer, refused
from shardwise.config.problems import Path, Problems
from shardwise.config.sections import BF16Section, FP16Section, TorchAutocastSection, ZeroSection
from shardwise.errors import ConfigError


def check_world_size(world_size: object) -> None:
    """Raise ConfigError unless the world size is an integer >= 1."""
    message = refused(Integer(1), world_size) if isinstance(world_size, int) else f"{world_size!r} is no integer"
    if message is not None:
        raise ConfigError(f"world_size: {message}")


def check_across(sections: Mapping[str, Any], world_size: int, problems: Problems) -> None:
    """Report contradictions between good values."""
    fp16: FP16Section = sections.get("fp16") or FP16Section()
    bf16: BF16Section = sections.get("bf16") or BF16Section()
    paths = (("fp16", "enabled"), ("bf16", "enabled"))
    if fp16.enabled and bf16.enabled and not problems.touches(*paths):
        problems.add(paths[0], "true, but bf16.enabled is true as well; enable one of the two")
    autocast: TorchAutocastSection = sections.get("torch_autocast") or TorchAutocastSection()
    if autocast.lower_precision_safe_modules:
        problems.add(
            ("torch_autocast", "lower_precision_safe_modules"),
            "has not landed yet: gradients of all modules are reduced in communication_data_type; remove the key",
            "later",
        )
    zero = sections.get("zero_optimization")
    if isinstance(zero, ZeroSection):
        _check_mics(zero, world_size, problems)
        _check_hpz(zero, world_size, problems)


def _zero(name: str) -> Path:
    return ("zero_optimization", name)


def _check_mics(zero: ZeroSection, world_size: int, problems: Problems) -> None:
    path, size = _zero("mics_shard_size"), zero.mics_shard_size
    if size == -1 or problems.touches(path):
        return
    if world_size % size:
        problems.add(path, f"{size} does not divide the world size {world_size}; write {_divisors(world_size)} or -1")
    elif size > 1 and zero.stage == 0 and not problems.touches(_zero("stage")):
        problems.add(path, f"{size} ranks are to share the model, but zero_optimization.stage 0 shards nothing")


def _check_hpz(zero: ZeroSection, world_size: int, problems: Problems) -> None:
    path, size = _zero("zero_hpz_partition_size"), zero.zero_hpz_partition_size
    if size == 1 or problems.touches(path):
        return
    if world_size % size:
        problems.add(path, f"{size} does not divide the world size {world_size}; write {_divisors(world_size)}")
    elif zero.stage != 3 and not problems.touches(_zero("stage")):
        problems.add(path, f"{size} needs zero_optimization.stage 3, which is {zero.stage}; remove the key")
    elif zero.mics_shard_size != -1 and not problems.touches(_zero("mics_shard_size")):
        other = f"zero_optimization.mics_shard_size {zero.mics_shard_size}"
        problems.add(path, f"{size} cannot be combined with {other}; keep one of the two")


def _divisors(number: int) -> str:
    found = [value for value in range(1, min(number, 4096) + 1) if number % value == 0]
    return " or ".join(str(value) for value in found[:8])
