"""Big models for inference on one process: built without memory, loaded piece by piece, spread over what there is."""

from shardwise.big_models.balance import get_balanced_memory
from shardwise.big_models.checkpoint_dispatch import load_checkpoint_and_dispatch
from shardwise.big_models.device_map import check_device_map
from shardwise.big_models.dispatch import cpu_offload, disk_offload, dispatch_model, remove_hook_from_submodules
from shardwise.big_models.empty import init_empty_weights, init_on_device
from shardwise.big_models.hooks import ModelHook, SequentialHook, add_hook_to_module, remove_hook_from_module
from shardwise.big_models.loading import load_checkpoint_in_model
from shardwise.big_models.planning import infer_auto_device_map
from shardwise.big_models.sizes import compute_module_sizes, get_max_memory
from shardwise.big_models.tensors import find_tied_parameters
from shardwise.big_models.whole import CpuOffload, UserCpuOffloadHook, cpu_offload_with_hook

__all__ = [
    "CpuOffload",
    "ModelHook",
    "SequentialHook",
    "UserCpuOffloadHook",
    "add_hook_to_module",
    "check_device_map",
    "compute_module_sizes",
    "cpu_offload",
    "cpu_offload_with_hook",
    "disk_offload",
    "dispatch_model",
    "find_tied_parameters",
    "get_balanced_memory",
    "get_max_memory",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
    "remove_hook_from_module",
    "remove_hook_from_submodules",
]
