"""What two sections, or a section and the world size, must agree on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.config.fields import Integer, refused
from shardwise.config.problems import Path, Problems
from shardwise.config.sections import (
    BF16Section,
    DataTypesSection,
    FP16Section,
    TorchAutocastSection,
    ZeroSection,
)
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
    _check_dtypes(sections, fp16, bf16, problems)
    _check_reduction(sections, problems)
    zero = sections.get("zero_optimization")
    if isinstance(zero, ZeroSection):
        _check_mics(zero, world_size, problems)
        _check_hpz(zero, world_size, problems)


def _check_dtypes(sections: Mapping[str, Any], fp16: FP16Section, bf16: BF16Section, problems: Problems) -> None:
    types: DataTypesSection = sections.get("data_types") or DataTypesSection()
    dtype = "fp16" if fp16.enabled else "bf16" if bf16.enabled else "fp32"
    if types.param_dtype not in (None, dtype):
        problems.add(
            ("data_types", "param_dtype"),
            f'"{types.param_dtype}", but fp16.enabled and bf16.enabled make the parameters {dtype}; '
            f"write {_switch(types.param_dtype)} or remove the key",
        )
    if types.grad_accum_dtype not in (None, "fp32", dtype):
        problems.add(
            ("data_types", "grad_accum_dtype"),
            f'"{types.grad_accum_dtype}" is narrower than the gradients, which are {dtype}; write "fp32"'
            + (f' or "{dtype}"' if dtype != "fp32" else ""),
        )
    autocast: TorchAutocastSection = sections.get("torch_autocast") or TorchAutocastSection()
    products = {"float16": "fp16", "bfloat16": "bf16"}.get(autocast.dtype or "")
    if autocast.enabled and products is not None and dtype not in ("fp32", products):
        problems.add(
            ("torch_autocast", "dtype"),
            f'"{autocast.dtype}", but {dtype}.enabled makes the parameters {dtype} and torch_autocast.enabled is true: '
            "the two dtypes would meet in one operation; keep one of the two sections",
        )
    if bf16.bf16_optimizer_states != bf16.bf16_master_weights_and_grads:
        problems.add(
            ("bf16", "bf16_master_weights_and_grads"),
            "and bf16.bf16_optimizer_states go together: an optimizer's state has the dtype of the weights that it "
            "steps; write both as true, or neither",
        )


def _switch(dtype: str | None) -> str:
    return '"fp32", or leave both out,' if dtype == "fp32" else f'"{dtype}": {{"enabled": true}}'


def _check_reduction(sections: Mapping[str, Any], problems: Problems) -> None:
    if sections.get("gradient_allreduce_op") == "sum":
        if sections.get("prescale_gradients"):
            problems.add(("prescale_gradients",), 'true, but gradient_allreduce_op is "sum": nothing is divided')
        if sections.get("gradient_normalization") == "tokens":
            problems.add(
                ("gradient_normalization",),
                '"tokens" is a mean over the tokens of all ranks, but gradient_allreduce_op is "sum"; keep one',
            )
    vocabulary = sections.get("vocabulary_size")
    if vocabulary is not None and vocabulary % 8:
        problems.warnings.append(
            f"vocabulary_size: {vocabulary} is no multiple of 8; GPUs multiply faster with {-(-vocabulary // 8) * 8}"
        )


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
