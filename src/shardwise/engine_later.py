"""Names of upstream's engine whose capability has not landed: they say so, instead of being looked up on the model."""

from __future__ import annotations

from typing import Any, NoReturn

from shardwise.errors import NotYetSupported


class LaterMethods:
    """Raises :class:`NotYetSupported` for what is planned."""

    timers = None
    flops_profiler = None
    loaded_checkpoint_dp_world_size = None

    def save_checkpoint(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Has not landed."""
        _later("save_checkpoint", "save `engine.module_state_dict()` on the first rank (all ranks call it)")

    def load_checkpoint(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Has not landed."""
        _later("load_checkpoint", "load whole weights with `engine.load_module_state_dict()`")

    def save_16bit_model(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Has not landed."""
        _later("save_16bit_model", "save `engine.module_state_dict()` with safetensors")

    save_fp16_model = save_16bit_model

    def offload_states(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Has not landed."""
        _later("offload_states", "states stay on the device")

    def reload_states(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Has not landed."""
        _later("reload_states", "states stay on the device")

    def coalesce_grad_reduction(self) -> NoReturn:
        """Has not landed."""
        _later("coalesce_grad_reduction", "use gradient_accumulation_steps")


def _later(name: str, instead: str) -> NoReturn:
    raise NotYetSupported(f"engine.{name}: has not landed yet; {instead}.")
