"""`accelerator.state`: what scripts read about the run in one place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.accelerator import current
from shardwise.accelerator.deepspeed import DeepSpeedPlugin
from shardwise.accelerator.kinds import DistributedType
from shardwise.accelerator.process import Processes
from shardwise.accelerator.settings import TorchDynamoPlugin
from shardwise.errors import ConfigError

RESET = (
    "`AcceleratorState` object has no attribute `{name}`. This happens if `AcceleratorState._reset_state()` was called "
    "and an `Accelerator` or `PartialState` was not reinitialized."
)


class State:
    """The processes, the precision and the plugins of one Accelerator.

    Names that are not here are looked up on the processes.

    Args:
        processes: of the run.
        mixed_precision: "no", "bf16" or "fp16".
        plugins: by name; the first one is in use.
        dynamo_plugin: how models are compiled.
    """

    def __init__(
        self,
        processes: Processes,
        mixed_precision: str = "no",
        plugins: Mapping[str, DeepSpeedPlugin] | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
    ) -> None:
        self._processes = processes
        self._closed = False
        self._plugins = dict(plugins or {})
        self._selected = next(iter(self._plugins), None)
        self.mixed_precision = mixed_precision
        self.dynamo_plugin = dynamo_plugin or TorchDynamoPlugin()

    @property
    def processes(self) -> Processes:
        """This process among all."""
        if self._closed:
            raise AttributeError(RESET.format(name="distributed_type"))
        return self._processes

    @property
    def distributed_type(self) -> DistributedType:
        """``DEEPSPEED`` with an engine, else as the processes say."""
        kind = self.processes.distributed_type
        return DistributedType.DEEPSPEED if self._selected is not None else kind

    @property
    def debug(self) -> bool:
        """Whether collectives compare shapes first."""
        return self.processes.debug

    @debug.setter
    def debug(self, value: bool) -> None:
        self.processes.debug = value

    @property
    def deepspeed_plugins(self) -> dict[str, DeepSpeedPlugin]:
        """All of them, by name."""
        return self._plugins

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """The one that is in use; None in a plain run."""
        return None if self._selected is None else self._plugins[self._selected]

    def get_deepspeed_plugin(self, name: str) -> DeepSpeedPlugin:
        """One of several plugins.

        Raises:
            ConfigError: there is none of this name.
        """
        if name not in self._plugins:
            raise ConfigError(
                f"deepspeed_plugins: there is no {name!r}; there are {', '.join(self._plugins) or 'none'}."
            )
        return self._plugins[name]

    def select_deepspeed_plugin(self, name: str) -> None:
        """Use this plugin for what is prepared from now on.

        Raises:
            ConfigError: there is none of this name.
        """
        self.get_deepspeed_plugin(name)
        self._selected = name

    def close(self) -> None:
        """The state was reset: whoever goes on to use it is told."""
        self._closed = True

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """Part with the newest Accelerator, as ``AcceleratorState._reset_state`` does."""
        current.reset()

    @property
    def initialized(self) -> bool:
        """Whether it may be used."""
        return not self._closed

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if self._closed:
            raise AttributeError(RESET.format(name=name))
        return getattr(self._processes, name)

    def __repr__(self) -> str:
        lines = [repr(self._processes).rstrip("\n"), f"Mixed precision type: {self.mixed_precision}"]
        if self.deepspeed_plugin is not None:
            lines.append(f"ds_config: {self.deepspeed_plugin.deepspeed_config}")
        return "\n".join(lines) + "\n"
