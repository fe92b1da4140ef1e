"""Options and file keys of Accelerate's launcher that mean nothing here, each with the reason that is given."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

_FSDP = "FSDP is not used here: ZeRO stage 3 shards the same things; use --use_deepspeed --zero_stage 3"
_MEGATRON = "Megatron-LM is not used here; use --use_deepspeed with a ds_config"
_PARALLEL = "tensor, context and sequence parallelism have not landed yet"
_TPU = "TPUs are not supported: the ranks run on CPUs or NVIDIA GPUs"
_FP8 = "fp8 has not landed yet; use --mixed_precision bf16"
_SAGEMAKER = "Amazon SageMaker is not supported: compute_environment is LOCAL_MACHINE"
_OUTPUT = "the output of every rank passes through the launcher; redirect it there, as in `2>&1 | tee FILE`"
_DEVICE = "this kind of device is not supported: the ranks run on CPUs or NVIDIA GPUs"
_REMOTE = "on other hosts nothing is started: run the command on each, as --hostfile prints it"


@dataclass(frozen=True)
class Refused:
    """Options that are refused.

    Attributes:
        names: the names without dashes, or a prefix ending in `*`.
        why: the reason.
        later: whether it is planned, rather than without a meaning here.
    """

    names: tuple[str, ...]
    why: str
    later: bool = False

    def covers(self, name: str) -> bool:
        """Whether this row is about the option `name`, spelt with underscores."""
        return any(name.startswith(n[:-1]) if n.endswith("*") else name == n for n in self.names)


TABLE = (
    Refused(("use_fsdp", "fsdp_*"), _FSDP),
    Refused(("use_megatron_lm", "megatron_lm_*"), _MEGATRON),
    Refused(("use_parallelism_config", "parallelism_config", "parallelism_config_*"), _PARALLEL, later=True),
    Refused(
        ("tpu", "tpu_*", "no_tpu_cluster", "vm", "env", "command", "command_file", "commands", "downcast_bf16"), _TPU
    ),
    Refused(
        ("aws_*", "sagemaker_*", "ec2_instance_type", "iam_role_name", "image_uri", "profile", "region"), _SAGEMAKER
    ),
    Refused(("base_job_name", "pytorch_version", "transformers_version", "py_version", "additional_args"), _SAGEMAKER),
    Refused(("fp8_*",), _FP8, later=True),
    Refused(("mpirun_*",), "MPI is not needed: the ranks of this machine are started here. " + _REMOTE),
    Refused(("ipex", "ipex_config", "use_xpu", "multi_xpu", "multi_npu", "multi_mlu", "multi_hpu"), _DEVICE),
    Refused(("enable_cpu_affinity",), "ranks are not bound to cores; start the launcher under numactl", later=True),
    Refused(("tee", "t", "log_dir", "role"), _OUTPUT),
    Refused(("rdzv_conf",), "the rendezvous takes no settings; use --rdzv_backend and --main_process_ip"),
    Refused(
        ("deepspeed_inclusion_filter", "deepspeed_exclusion_filter"),
        "hosts are not filtered; leave them out of the hostfile",
    ),
    Refused(("deepspeed_moe_layer_cls_names",), "mixtures of experts have not landed yet", later=True),
    Refused(
        ("offload_optimizer_nvme_path", "offload_param_nvme_path"),
        'offload to NVMe has not landed yet; leave it out, or write "none"',
        later=True,
    ),
)


def refused(name: str) -> Refused | None:
    """The row of an option or key, in any spelling; None if it is not refused."""
    plain = name.lstrip("-").replace("-", "_")
    return next((row for row in TABLE if row.covers(plain)), None)


def close_option(typed: str, known: Iterable[str]) -> str:
    """`; did you mean --that?` when a known option is close to what was typed, in the spelling that was typed."""
    spelling = "-" if "-" in typed.lstrip("-") else "_"
    plain = {name.lstrip("-").replace("-", "_"): name for name in known}
    wanted = typed.lstrip("-").replace("-", "_").lower()
    # argparse takes any beginning of an option, so that is what people type; here it has to be whole.
    begun = sorted((name for name in plain if len(wanted) > 2 and name.startswith(wanted)), key=len)
    close = begun[:1] or difflib.get_close_matches(wanted, list(plain), n=1)
    return f"; did you mean --{close[0].replace('_', spelling)}?" if close else ""
