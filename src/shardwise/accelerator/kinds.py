"""The names of what a script may run on, so that comparisons in scripts mean the same here."""

from __future__ import annotations

from enum import Enum


class DistributedType(str, Enum):
    """How the processes of a run work together.

    Shardwise itself says ``NO``, ``MULTI_CPU``, ``MULTI_GPU`` and ``DEEPSPEED``. The others exist because scripts
    compare with them; they are never true.
    """

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"


class RNGType(str, Enum):
    """Whose random numbers: torch's on the CPU, those of a kind of device, or one ``torch.Generator``'s."""

    TORCH = "torch"
    CUDA = "cuda"
    MLU = "mlu"
    SDAA = "sdaa"
    MUSA = "musa"
    NPU = "npu"
    XLA = "xla"
    XPU = "xpu"
    HPU = "hpu"
    NEURON = "neuron"
    GENERATOR = "generator"
