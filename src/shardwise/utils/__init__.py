"""The helpers that training scripts import beside `Accelerator`, under the names that they know."""

from __future__ import annotations

import importlib
from typing import Any

from shardwise.utils.available import available
from shardwise.utils.elsewhere import where

# Where each name lives. They are loaded when they are first used.
HOMES = {
    "shardwise.accelerator.settings": (
        "AutocastKwargs",
        "DDPCommunicationHookType",
        "DataLoaderConfiguration",
        "DistributedDataParallelKwargs",
        "GradScalerKwargs",
        "GradientAccumulationPlugin",
        "InitProcessGroupKwargs",
        "KwargsHandler",
        "ProfileKwargs",
        "ProjectConfiguration",
        "TorchDynamoPlugin",
    ),
    "shardwise.accelerator.deepspeed": ("DeepSpeedPlugin", "DummyOptim", "DummyScheduler"),
    "shardwise.accelerator.kinds": ("DistributedType", "RNGType"),
    "shardwise.accelerator.operations": (
        "CannotPadNestedTensorWarning",
        "broadcast",
        "broadcast_object_list",
        "copy_tensor_to_devices",
        "gather",
        "gather_object",
        "pad_across_processes",
        "reduce",
    ),
    "shardwise.accelerator.agreement": ("DistributedOperationException",),
    "shardwise.accelerator.nested": (
        "concatenate",
        "convert_outputs_to_fp32",
        "convert_to_fp32",
        "find_batch_size",
        "find_device",
        "honor_type",
        "is_namedtuple",
        "is_torch_tensor",
        "listify",
        "recursively_apply",
        "send_to_device",
        "slice_tensors",
    ),
    "shardwise.accelerator.seeds": ("set_seed", "synchronize_rng_state", "synchronize_rng_states"),
    "shardwise.accelerator.memory": (
        "clear_device_cache",
        "find_executable_batch_size",
        "release_memory",
        "should_reduce_batch_size",
    ),
    "shardwise.accelerator.loaders": ("SkipBatchSampler", "SkipDataLoader", "skip_first_batches"),
    "shardwise.accelerator.trackers": ("BlankTracker", "GeneralTracker"),
    "shardwise.utils.models": ("extract_model_from_parallel", "has_compiled_regions", "is_compiled_module", "save"),
    "shardwise.utils.environment": ("clear_environment", "patch_environment", "tqdm"),
    "shardwise.utils.small": (
        "LoggerType",
        "PrecisionType",
        "compare_versions",
        "is_torch_version",
        "merge_dicts",
        "parse_flag_from_env",
        "str_to_bool",
        "wait_for_everyone",
    ),
    "shardwise.zero": ("GatheredParameters",),
    "shardwise.big_models": (
        "check_device_map",
        "compute_module_sizes",
        "find_tied_parameters",
        "get_balanced_memory",
        "get_max_memory",
        "infer_auto_device_map",
        "load_checkpoint_in_model",
    ),
}
_WHERE = {name: home for home, names in HOMES.items() for name in names}

# Names of upstream's that have no counterpart, and what to do instead.
REFUSED = {
    "FullyShardedDataParallelPlugin": "choose a ZeRO stage: DeepSpeedPlugin(zero_stage=3) shards as FSDP does",
    "MegatronLMPlugin": "tensor and pipeline parallelism have not landed",
    "ParallelismConfig": "parallelism other than ZeRO has not landed",
    "TorchTensorParallelPlugin": "tensor parallelism has not landed",
    "AORecipeKwargs": "fp8 has not landed; mixed_precision='bf16' is the next best",
    "TERecipeKwargs": "fp8 has not landed; mixed_precision='bf16' is the next best",
    "MSAMPRecipeKwargs": "fp8 has not landed; mixed_precision='bf16' is the next best",
    "FP8RecipeKwargs": "fp8 has not landed; mixed_precision='bf16' is the next best",
    "BnbQuantizationConfig": "quantised loading has not landed; transformers' own quantization_config works",
    "load_and_quantize_model": "quantised loading has not landed; transformers' own quantization_config works",
    "HfDeepSpeedConfig": "give its dict or path to DeepSpeedPlugin(hf_ds_config=)",
    "save_fsdp_model": "accelerator.save_state writes sharded models",
    "load_fsdp_model": "accelerator.load_state reads sharded models",
    "merge_fsdp_weights": "accelerator.save_model writes whole weights",
}

__all__ = sorted(_WHERE)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    if name in REFUSED:
        # Not an AttributeError: an import would hide its message.
        raise ImportError(f"shardwise.utils.{name}: {REFUSED[name]}.")
    found = available(name)
    if found is not None:
        return found
    if (instead := where(name)) is not None:
        raise ImportError(f"shardwise.utils.{name}: {instead}.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
