"""ZeRO, as a table. A stage is a row; nothing else in the library asks for a stage number."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Policy:
    """What one ZeRO stage does with parameters, gradients and optimizer state.

    Attributes:
        stage: the number in ``zero_optimization.stage``.
        release_params: parameters rest as shards and are gathered around their use; else they rest whole.
        reduce_each_micro_step: gradients are reduced in every backward; else only in the one before a step.
        shard_grads: after the reduction a rank keeps its slice of the gradient only; else the whole buffer stays.
        shard_optimizer: a rank steps its slice only; else every rank steps everything.
    """

    stage: int
    release_params: bool
    reduce_each_micro_step: bool
    shard_grads: bool
    shard_optimizer: bool


POLICIES = (
    #      stage  release  reduce each  shard   shard
    #             params   micro-step   grads   optimizer
    Policy(0, False, False, False, False),
    Policy(1, False, False, False, True),
    Policy(2, False, True, True, True),
    Policy(3, True, True, True, True),
)


def model_state_bytes(params: int, ranks: int, stage: int, *, param_bytes: int, mixed: bool) -> int:
    """Bytes of parameters, gradients and Adam state on one rank by the ZeRO formulas.

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2019),
    section 3.1, for mixed precision: 2 + 2 + 12 bytes a parameter. Full precision keeps no separate master copy:
    4 + 4 + 8.

    Args:
        params: parameters of the model.
        ranks: ranks that share the state.
        stage: ZeRO stage, 0 to 3.
        param_bytes: bytes of one parameter (and of one gradient) in the model.
        mixed: whether the optimizer holds fp32 master weights of its own.
    """
    policy = POLICIES[stage]
    optimizer = 12 if mixed else 2 * param_bytes
    weights = params * param_bytes // (ranks if policy.release_params else 1)
    gradients = params * param_bytes // (ranks if policy.shard_grads else 1)
    return weights + gradients + params * optimizer // (ranks if policy.shard_optimizer else 1)
