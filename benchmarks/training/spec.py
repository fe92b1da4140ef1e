"""What is compared: contenders, workload, and the numbers to reach. Imports no torch: the driver stays light."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Contender:
    """One way to train the model.

    Attributes:
        name: what ``--contenders`` and the raw numbers call it.
        label: what the tables call it.
        library: which builder makes it: ``compute``, ``ddp``, ``fsdp2``, ``deepspeed`` or ``shardwise``.
        stage: the ZeRO stage that it is, or is like. None for the compute alone.
    """

    name: str
    label: str
    library: str
    stage: int | None


CONTENDERS = (
    Contender("compute", "compute alone", "compute", None),
    Contender("ddp", "DDP", "ddp", 0),
    *(Contender(f"shardwise-{s}", f"shardwise stage {s}", "shardwise", s) for s in range(4)),
    *(Contender(f"deepspeed-{s}", f"DeepSpeed stage {s}", "deepspeed", s) for s in range(4)),
    Contender("fsdp2-keep", "FSDP2 reshard=False", "fsdp2", 2),
    Contender("fsdp2-reshard", "FSDP2 reshard=True", "fsdp2", 3),
)


@dataclass(frozen=True)
class Workload:
    """The model and the batch of each rank. The defaults are the model of 29.5 M parameters.

    Attributes:
        vocab, width, heads, layers, length: of the GPT; ``length`` is also the tokens of one sequence.
        batch: sequences a rank and step.
        lr: of AdamW; its other settings are torch's defaults, written out.
        clip: the largest norm of the gradient; 0 does not clip.
        threads: of each rank.
    """

    vocab: int = 4096
    width: int = 512
    heads: int = 8
    layers: int = 8
    length: int = 256
    batch: int = 4
    lr: float = 1e-4
    clip: float = 0.0
    threads: int = 1

    @property
    def adamw(self) -> dict[str, Any]:
        """Arguments of AdamW, the same for every contender."""
        return {"lr": self.lr, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01, "fused": True}

    @property
    def parameters(self) -> int:
        """How many parameters the model has."""
        return (2 * self.vocab + self.length + 2) * self.width + self.layers * self._block

    @property
    def _block(self) -> int:
        return 12 * self.width**2 + 13 * self.width

    def ds_config(self, stage: int) -> dict[str, Any]:
        """The ds_config that shardwise and DeepSpeed are both given.

        Every ``stage3_*`` default is larger than this model, so that neither would ever release a parameter. The keys
        here make both release each block after its forward and gather it again, as FSDP2 does with
        ``reshard_after_forward=True``; the room left holds the block in use, the next one, and the embedding.
        """
        zero: dict[str, Any] = {"stage": stage}
        if stage == 3:
            zero["stage3_max_reuse_distance"] = 0
            zero["stage3_max_live_parameters"] = 2 * self._block + self.vocab * self.width
            zero["stage3_param_persistence_threshold"] = 10_000
        return {
            "train_micro_batch_size_per_gpu": self.batch,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": self.clip,
            "optimizer": {"type": "AdamW", "params": {**self.adamw, "torch_adam": True}},
            "zero_optimization": zero,
            "steps_per_print": 1_000_000,
        }

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


QUICK = Workload(vocab=1024, width=192, heads=4, layers=3, length=64, batch=2)

# How much faster shardwise is to be, by library and stage; the largest overhead above the compute alone, by stage.
FASTER_THAN = {("deepspeed", 1): 1.25, ("deepspeed", 2): 1.2, ("deepspeed", 3): 1.2}
FASTER_THAN |= {("fsdp2", 2): 1.15, ("fsdp2", 3): 1.15}
LARGEST_OVERHEAD = {0: 0.15, 1: 0.15, 2: 0.15, 3: 0.20}
BYTES_TOLERANCE = 0.01


def expected_bytes(workload: Workload, stage: int, ranks: int) -> float:
    """Bytes that a rank sends in a step (ZeRO, arXiv:1910.02054, section 7): 2 or 3 times Psi (N - 1) / N elements."""
    return (3 if stage == 3 else 2) * workload.parameters * 4 * (ranks - 1) / ranks
