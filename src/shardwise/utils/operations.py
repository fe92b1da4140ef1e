"""As in :mod:`shardwise.utils`, for scripts that import from this module."""

from shardwise.accelerator.agreement import DistributedOperationException
from shardwise.accelerator.nested import (
    concatenate,
    convert_outputs_to_fp32,
    convert_to_fp32,
    find_batch_size,
    find_device,
    honor_type,
    recursively_apply,
    send_to_device,
    slice_tensors,
)
from shardwise.accelerator.operations import (
    broadcast,
    broadcast_object_list,
    copy_tensor_to_devices,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
)

__all__ = [
    "DistributedOperationException",
    "broadcast",
    "broadcast_object_list",
    "concatenate",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "copy_tensor_to_devices",
    "find_batch_size",
    "find_device",
    "gather",
    "gather_object",
    "honor_type",
    "pad_across_processes",
    "recursively_apply",
    "reduce",
    "send_to_device",
    "slice_tensors",
]
