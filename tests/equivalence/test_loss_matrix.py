"""Every step of every layout gives the loss and the gradient norm of plain torch in one process on the global batch.

Tolerances. In float64 and float32 the only difference to plain torch is the order of sums: over the samples of a batch
(cut by ranks and micro-steps) and inside fused optimizer kernels. Each is wrong by a few units of rounding, 1.1e-16 or
6e-8 relative, and 20 steps of a smooth model multiply that by at most some hundreds; 1e-10 and 1e-5 leave room for it
and none for a wrong weight of a rank or micro-step (an error of 1e-2 and more), a missing clip or a late parameter.
AdamW's first steps divide each gradient by its own size: with ``eps`` far below the gradients' rounding a gradient
element that happens to be almost zero would be stepped by rounding alone. In float32 ``eps`` is therefore 1e-4.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.equivalence.harness import Layout, Recipe, check, reference

RTOL = {"float64": 1e-10, "float32": 1e-5}
EPS = {"float64": 1e-8, "float32": 1e-4}

# Stage 3 with everything released at once; and with small parameters resting whole, units kept for their reuse, or both.
RELEASE_ALL = (("stage3_param_persistence_threshold", 0), ("stage3_max_reuse_distance", 0))
RELEASE_LESS = [
    (("stage3_param_persistence_threshold", 0),),
    (("stage3_param_persistence_threshold", 50), ("stage3_max_reuse_distance", 0)),
    (("stage3_param_persistence_threshold", 50),),
]


def optimizer_of(name: str, dtype: str) -> dict[str, Any]:
    if name == "AdamW":
        return {
            "optimizer": "AdamW",
            "params": (("lr", 0.01), ("weight_decay", 0.1), ("eps", EPS[dtype])),
        }
    return {"optimizer": "SGD", "params": (("lr", 0.05), ("momentum", 0.9), ("weight_decay", 0.01))}


# -- the matrix --


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_every_stage_and_accumulation_gives_the_losses_of_one_process(
    ranks: Any, world_size: int, dtype: str, optimizer: str
) -> None:
    layouts = [Layout(stage, gas) for stage in (0, 1, 2) for gas in (1, 4)]
    # The three milder ways to release take turns over the matrix.
    turn = world_size + 2 * (optimizer == "SGD") + (dtype == "float32")
    layouts += [Layout(3, gas, zero) for gas in (1, 4) for zero in (RELEASE_ALL, RELEASE_LESS[(turn + gas // 4) % 3])]
    cases = [
        (Recipe(dtype=dtype, tied=(i + world_size) % 2 == 0, **optimizer_of(optimizer, dtype)), layout)
        for i, layout in enumerate(layouts)
    ]
    results = check(ranks, world_size, cases, RTOL[dtype])
    norms, clip = results[0][0].norms, cases[0][0].clip
    assert min(norms) < 0.9 * clip, "no step was left unclipped"
    assert max(norms) > 1.1 * clip, "no step was clipped"
