from __future__ import annotations

import pytest

from shardwise.config import Config
from shardwise.errors import ConfigError, NotYetSupported

from .configs import minimal


def message(**keys):
    with pytest.raises(ConfigError) as caught:
        Config.load(minimal(**keys))
    assert not isinstance(caught.value, NotYetSupported)
    return str(caught.value)


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"optimiser": {}}, 'optimiser: unknown key; did you mean "optimizer"?'),
        ({"gradient_cliping": 1.0}, 'gradient_cliping: unknown key; did you mean "gradient_clipping"?'),
        ({"TrainBatchSize": 1}, 'TrainBatchSize: unknown key; did you mean "train_batch_size"?'),
        ({"zero_optimization": {"stge": 3}}, 'zero_optimization.stge: unknown key; did you mean "stage"?'),
        ({"zero_optimization": {"stge": None}}, 'zero_optimization.stge: unknown key; did you mean "stage"?'),
        (
            {"zero_optimization": {"offload_param": {"device": "none", "pin_memry": True}}},
            'zero_optimization.offload_param.pin_memry: unknown key; did you mean "pin_memory"?',
        ),
        (
            {"zero_optimization": {"leaf_module": {"clases": []}}},
            'zero_optimization.leaf_module.clases: unknown key; did you mean "classes"?',
        ),
        ({"tensorboard": {"enable": False}}, 'tensorboard.enable: unknown key; did you mean "enabled"?'),
        (
            {"optimizer": {"type": "AdamW", "params": {"weight_dacay": 0.1}}},
            'optimizer.params.weight_dacay: unknown key; did you mean "weight_decay"?',
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 10}}},
            'scheduler.params.warmup_steps: unknown key; did you mean "warmup_num_steps"?',
        ),
        (
            {"scheduler": {"type": "StepLR", "params": {"step_size": 1, "gama": 1}}},
            'scheduler.params.gama: unknown key; did you mean "gamma"?',
        ),
        (
            {"zero_optimization": {"gradient_clipping": 1.0}},
            'zero_optimization.gradient_clipping: unknown key here; "gradient_clipping" belongs at the top level',
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 10}}},
            "scheduler.params.total_num_steps: unknown key for this scheduler.type, which takes last_batch_iteration",
        ),
        (
            {"optimizer": {"type": "SGD", "params": {"betas": [0.9, 0.9]}}},
            "optimizer.params.betas: unknown key for this optimizer.type, which takes dampening",
        ),
        ({"stage": 3}, 'stage: unknown key here; "stage" belongs in zero_optimization'),
        ({"lr": 3}, 'lr: unknown key here; "lr" belongs in optimizer.params'),
        (
            {"optimizer": {"type": "SGD", "lr": 3}},
            'optimizer.lr: unknown key here; "lr" belongs in optimizer.params',
        ),
        ({"loss_scale": 0}, 'loss_scale: unknown key here; "loss_scale" belongs in fp16'),
        (
            {"bf16": {"enabled": True, "loss_scale": 0}},
            "bf16.loss_scale: unknown key; loss scaling is for fp16 only",
        ),
        ({"bfloat16": {"hysteresis": 2}}, "bfloat16.hysteresis: unknown key; loss scaling is for fp16 only"),
        ({"fp16": {"check_grad_overflow": True}}, '"check_grad_overflow" belongs in bf16'),
        ({"aio": {"thread_count": 1}}, 'aio.thread_count: unknown key; write "intra_op_parallelism"'),
        (
            {"zero_optimization": {"grad_hooks": True}},
            "zero_optimization.grad_hooks: unknown key; there is no such",
        ),
        ({"fp16": {"qqqq": 1}}, "fp16.qqqq: unknown key; known in fp16: auto_cast, consecutive_hysteresis"),
        ({"filled": {}}, "filled: unknown key"),
        ({"no_effect": {}}, "no_effect: unknown key"),
        ({"a.b c": 1}, "a.b c: unknown key"),
        (
            {"bf16": {"stage3_prefetch_bucket_sze": 1}},
            'did you mean "stage3_prefetch_bucket_size"? "stage3_prefetch_bucket_size" belongs in zero_optimization',
        ),
    ],
)
def test_an_unknown_key_is_explained(keys, line):
    assert line in message(**keys)


def test_every_problem_is_listed_at_once():
    text = message(
        optimiser={},
        gradient_clipping=-1,
        fp16=[],
        seed=True,
        bf16={"enabled": "auto"},
        optimizer={"type": "Adamm", "params": {}},
        scheduler={"type": "WarmupDecayLR", "params": {"warmup_type": "cubic"}},
        zero_optimization={
            "stge": 1,
            "stage": 4,
            "offload_param": {"device": "cpu"},
            "leaf_module": {"names": 3},
        },
        flops_profiler={"enabled": True},
    )
    assert text.startswith("13 problems in the config:\n")
    for path in (
        "optimiser",
        "gradient_clipping",
        "fp16",
        "seed",
        "bf16.enabled",
        "optimizer.type",
        "scheduler.params.total_num_steps",
        "scheduler.params.warmup_type",
        "zero_optimization.stge",
        "zero_optimization.stage",
        "zero_optimization.offload_param.device",
        "zero_optimization.leaf_module.names",
        "flops_profiler.enabled",
    ):
        assert f"\n  {path}: " in text
