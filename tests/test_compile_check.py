"""`compile`: what is wrong is said before the model is changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwise import ConfigError
from shardwise.compile_check import arguments, check_compile
from tests.checkpointing.models import Model, made, start

REFUSED: dict[str, tuple[dict[str, Any], int]] = {
    "^compile.backend: 'inducter' is unknown; torch knows .*inductor": ({"backend": "inducter"}, 0),
    "^compile.kwargs.fulgraph: unknown; torch.compile takes mode, fullgraph": ({"kwargs": {"fulgraph": True}}, 0),
    "mode and options are both given": ({"kwargs": {"mode": "default", "options": {"max_autotune": True}}}, 0),
    r"CUDA graphs .*\.stage 3": ({"kwargs": {"mode": "reduce-overhead"}}, 3),
    r"^compile.kwargs.mode: 'fast' is unknown; torch knows default, .*max-autotune": ({"kwargs": {"mode": "fast"}}, 0),
    "^compile.kwargs.mode: 3 is unknown": ({"kwargs": {"mode": 3}}, 3),
    "^compile.kwargs.mode: .* those of the back-end inductor, and compile.backend is 'eager'": (
        {"backend": "eager", "kwargs": {"mode": "max-autotune"}},
        0,
    ),
    "^compile.kwargs.options: .*compile.backend is 'aot_eager'": (
        {"backend": "aot_eager", "kwargs": {"options": {"max_autotune": True}}},
        0,
    ),
    "^compile.kwargs.options: 'x' is no object": ({"kwargs": {"options": "x"}}, 0),
    "^compile.kwargs.options.max_autotun: unknown to torch's inductor; did you mean 'max_autotune'": (
        {"kwargs": {"options": {"max_autotun": True}}},
        0,
    ),
    "^compile.kwargs: Unexpected type of attr max_autotune": ({"kwargs": {"options": {"max_autotune": "yes"}}}, 0),
    "^compile.kwargs.dynamic: 'yes' is wrong; write true, false or null": ({"kwargs": {"dynamic": "yes"}}, 0),
    "^compile.kwargs.fullgraph: None is wrong; write true or false": ({"kwargs": {"fullgraph": None}}, 0),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused_before_the_model_is_changed(message: str) -> None:
    section, stage = REFUSED[message]
    model = made()
    with pytest.raises(ConfigError, match=message):
        start(model, stage, compile={"enabled": True, **section})
    assert all("forward" not in m.__dict__ for m in model.modules())
    engine = start(model, stage)
    with pytest.raises(ConfigError, match=message):
        engine.compile(section.get("backend"), section.get("kwargs"))
    assert not engine.is_compiled
    engine.destroy()


@pytest.mark.parametrize(
    ("backend", "kwargs"),
    [
        ("inductor", {"mode": "max-autotune-no-cudagraphs", "dynamic": None, "fullgraph": False}),
        ("inductor", {"mode": None, "options": {"triton.cudagraphs": False, "max-autotune": True}}),
        ("eager", {"mode": "default", "options": None, "dynamic": True}),
        ("aot_eager", {"options": {}}),
    ],
)
def test_taken(backend: str, kwargs: dict[str, Any]) -> None:
    check_compile(Model(), backend, kwargs, 3)


def test_the_options_of_the_user_are_left_whole() -> None:
    """torch takes this one out of what it is given."""
    kwargs = {"options": {"guard_filter_fn": lambda guards: [True] * len(guards)}}
    check_compile(Model(), "inductor", kwargs, 0)
    assert list(kwargs["options"]) == ["guard_filter_fn"]
    torch.compile(lambda: None, **arguments(kwargs))
    assert list(kwargs["options"]) == ["guard_filter_fn"]
