"""`dump_state`: what the engine is, in tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.monitor.tables import size, table
from shardwise.monitor.tracker import leaves, without_secrets

if TYPE_CHECKING:
    from shardwise.engine_state import EngineState
    from shardwise.optim.sharded import ShardedOptimizer
    from shardwise.sharding import Unit


def describe(engine: EngineState, units: list[Unit]) -> str:
    """The engine's sizes, units, parameter groups and resolved configuration, as text."""
    train, micro, window = engine.get_batch_info()
    report = engine.memory_report()
    facts = [
        ("model", type(engine.module).__name__),
        ("parameters", f"{sum(slot.numel for u in units for slot in u.slots):,}"),
        ("ZeRO stage", engine.zero_optimization_stage()),
        ("device", engine.device),
        *((f"axis {axis.name}", f"{axis.size} ranks, this is {axis.position}") for axis in engine.mesh.axes()),
        ("batch", f"{train} samples a step = {micro} a micro-step x {window} micro-steps x {engine.world_size} ranks"),
        ("optimizer", "none" if engine.optimizer is None else type(engine.optimizer.optimizer).__name__),
        ("schedule", "none" if engine.lr_scheduler is None else type(engine.lr_scheduler).__name__),
        ("model state now", size(report["total"])),
    ]
    found = [table("Engine", ["", ""], facts), _units(units)]
    if engine.optimizer is not None:
        found.append(_groups(engine.optimizer))
    values = leaves(without_secrets(engine.config.as_dict()))
    found.append(table("Configuration", ["key", "value"], [(path, _shown(value)) for path, value in values]))
    return "state of the engine\n\n" + "\n\n".join(found)


def _units(units: list[Unit]) -> str:
    rows = [
        (
            u.index,
            u.name,
            len(u.slots),
            f"{sum(slot.numel for slot in u.slots):,}",
            f"{u.shard.numel():,}",
            str(u.dtype).removeprefix("torch."),
            size(u.nbytes),
            "gathered" if u.releases else "whole",
        )
        for u in units
    ]
    columns = [">unit", "name", ">parameters", ">elements", ">shard", "dtype", ">at rest", "parameters are"]
    return table("Units", columns, rows)


def _groups(optimizer: ShardedOptimizer) -> str:
    rows = []
    for i, group in enumerate(optimizer.param_groups):
        options = ", ".join(f"{name}={_shown(value)}" for name, value in group.items() if name != "params")
        rows.append((i, len(group["params"]), f"{sum(p.numel() for p in group['params']):,}", options))
    return table("Optimizer groups (this rank's pieces)", [">group", ">pieces", ">elements", "options"], rows)


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
