"""The known keys of training and parallelism that are not honoured."""

from __future__ import annotations

from shardwise.config.keys import (
    Group,
    Key,
    anything,
    flag,
    integer,
    items,
    not_yet,
    number,
    refused,
    refused_key,
    switched,
    text,
    without_effect,
)

_OFFLOAD = "offloading"
_ZEROPP = (
    "quantised weights and gradients change the loss; write zero_hpz_partition_size or bf16 for less traffic, and "
    "remove the key"
)
_APEX = 'Apex and its kind are gone; write "bf16": {"enabled": true}, "fp16" or "torch_autocast" instead'

_OFFLOAD_PARAM = Group(
    {
        "device": text("none"),
        "nvme_path": text(),
        "buffer_count": integer(5),
        "buffer_size": integer(100_000_000),
        "max_in_cpu": integer(1_000_000_000),
        "pin_memory": flag(True, False),
    },
    switch="device",
    off=("none",),
    absent="none",
    why=_OFFLOAD,
)

_OFFLOAD_OPTIMIZER = Group(
    {
        "device": text("none"),
        "nvme_path": text(),
        "buffer_count": integer(4),
        "pin_memory": flag(True, False),
        "pipeline_read": flag(),
        "pipeline_write": flag(),
        "fast_init": flag(),
        "ratio": number(1.0),
        "super_offload": flag(),
        "cpuadam_cores_perc": number(0.8),
    },
    switch="device",
    off=("none",),
    absent="none",
    why=_OFFLOAD,
)

_ZERO = Group(
    {
        "offload_param": _OFFLOAD_PARAM,
        "offload_optimizer": _OFFLOAD_OPTIMIZER,
        "use_multi_rank_bucket_allreduce": without_effect(flag(True), "a bucket is one collective of all ranks"),
        "load_from_fp32_weights": Key((True,), (bool,), why="loading checkpoints"),
        "elastic_checkpoint": Key((False,), (bool,), why="checkpoints, which will open at any number of ranks"),
        "zenflow": Group(
            {
                "topk_ratio": number(0.1),
                "select_strategy": text("auto"),
                "select_interval": anything("auto"),
                "update_interval": anything("auto"),
                "overlap_step": flag(),
                "offload": flag(),
                "auto_ratio": number(0.99),
                "full_warm_up_rounds": integer(0),
                "pt_reserved_cores_perc": number(0.5),
            },
            request=True,
            why=_OFFLOAD,
        ),
        "stage3_use_all_reduce_for_fetch_params": without_effect(flag(), "parameters are gathered in place"),
        "stage3_allgather_sequential": without_effect(flag(), "a unit is one gather, and gathers have one order"),
        "legacy_stage1": refused_key(flag(), 'there is one stage 1; remove the key or write "stage": 1'),
        "round_robin_gradients": without_effect(flag(), "ranks own slices of equal size"),
        "zero_quantized_weights": refused_key(flag(), _ZEROPP),
        "zero_quantized_nontrainable_weights": refused_key(flag(), _ZEROPP),
        "zero_quantized_gradients": refused_key(flag(), _ZEROPP),
        "zeropp_loco_param": refused(Group({"err_beta": number(0.8), "reset_T": integer(1024)}, request=True), _ZEROPP),
        "mics_hierarchical_params_gather": without_effect(flag(), "a shard group is gathered in one call"),
        "memory_efficient_linear": without_effect(flag(True), "autograd keeps no copy of a gathered parameter"),
        "pipeline_loading_checkpoint": Key((False,), (bool,), why="loading checkpoints"),
        "override_module_apply": without_effect(
            flag(True), "under zero.Init `module.apply` sees whole parameters, module by module"
        ),
        "log_trace_cache_warnings": without_effect(flag(), "a changed order of modules is learnt anew"),
        "enable_sanity_checks": without_effect(flag(), "checks are always on"),
        "save_muon_momentum_buffer_in_memory": without_effect(flag(), "optimizer state stays where it is"),
    },
    honoured=True,
)

_EXPERTS = not_yet(
    switched(
        autoep_size=integer(1),
        expert_tensor_parallel_size=integer(1),
        validate_folding_routing=flag(),
        preset_model=text(),
        moe_layer_pattern=text(),
        expert_pattern=text(),
        router_pattern=text(),
        use_grouped_mm=flag(True),
        disable_triton_grouped_mm=flag(),
        route_norm=anything(),
        route_scale=number(1.0),
        score_apply=anything("auto"),
        score_func=anything("auto"),
        top_k=anything("auto"),
        combine_impl=anything("auto"),
        routed_scaling_factor=anything("auto"),
        num_expert_groups=integer(),
        num_limited_groups=integer(),
        load_balance_coeff=number(),
        expert_w1=text(),
        expert_w2=text(),
        expert_w3=text(),
        num_experts_attr=text(),
        top_k_attr=text(),
        has_shared_experts=anything(),
        shared_experts_pattern=text(),
        shared_experts_gate_pattern=text(),
    ),
    "expert parallelism",
)

_PASSES = "it steers upstream's compiler passes; here the engine's hooks move data outside of compiled code"


TRAINING: dict[str, Key | Group] = {
    "optimizer": Group(
        {"legacy_fusion": without_effect(flag(), "there is one implementation of each optimizer")}, honoured=True
    ),
    "fp16": Group(
        {
            "fp16_master_weights_and_grads": refused_key(
                flag(), "fp16 masters lose small updates; write bf16 with bf16_master_weights_and_grads, or remove it"
            )
        },
        honoured=True,
    ),
    "zero_optimization": _ZERO,
    "seq_parallel_communication_data_type": Key(("fp32",), (str,), why="sequence parallelism"),
    "sequence_parallel_size": Key((1,), (int,), why="sequence parallelism"),
    "data_parallel_size": Key((), (int,), why="a mesh of several axes"),
    "graph_harvesting": refused_key(
        flag(),
        'write "compile": {"enabled": true, "kwargs": {"mode": "reduce-overhead"}} for CUDA graphs, below stage 3',
    ),
    "use_data_before_expert_parallelism": Key((False,), (bool,), why="expert parallelism"),
    "amp": refused(switched(open=True), _APEX),
    "msamp": refused(switched(open=True), _APEX),
    "pipeline": Group(
        {
            "stages": anything("auto"),
            "partition": text("best"),
            "seed_layers": flag(),
            "activation_checkpoint_interval": integer(0),
            "pipe_partitioned": flag(True),
            "grad_partitioned": flag(True),
            "use_reentrant": flag(True),
        },
        why="pipeline parallelism",
    ),
    "tensor_parallel": Group(
        {
            "autotp_size": integer(0, 1),
            "dtype": text("fp16"),
            "tp_overlap_comm": flag(),
            "tp": Group(
                {
                    "tp_size": integer(1),
                    "tp_grain_size": integer(1),
                    "mpu": anything(),
                    "tp_group": anything(),
                }
            ),
            "injection_policy_tuple": anything(),
            "partition_config": Group({"use_default_specs": flag(True), "layer_specs": items([])}),
            "preset_model": text(),
            "keep_module_on_host": flag(),
            "kernel_inject": flag(),
        },
        why="tensor parallelism",
    ),
    "expert_parallel": _EXPERTS,
    "compile": Group(
        {
            "passes": refused_key(items(), "these are upstream's own compiler passes; remove the key"),
            "free_activation": without_effect(flag(), _PASSES),
            "free_activation_threshold": without_effect(integer(10 * 2**20), _PASSES),
            "offload_activation": refused_key(flag(), 'write "activation_checkpointing": {"cpu_checkpointing": true}'),
            "offload_activation_pin_memory": without_effect(flag(True), _PASSES),
            "offload_opt_states": Key((False,), (bool,), why=_OFFLOAD),
            "offload_parameters": Key((False,), (bool,), why=_OFFLOAD),
            "double_buffer": without_effect(flag(True), _PASSES),
            "symmetric_memory": without_effect(flag(), _PASSES),
            "debug_log": without_effect(flag(), _PASSES),
            "sync_before_reduce": without_effect(flag(), _PASSES),
            "sync_after_reduce": without_effect(flag(), _PASSES),
            "sync_before_allgather": without_effect(flag(), _PASSES),
            "sync_after_allgather": without_effect(flag(), _PASSES),
            "keep_int_input_tensors": without_effect(flag(True), _PASSES),
            "keep_all_input_tensors": without_effect(flag(), _PASSES),
        },
        honoured=True,
    ),
    "hybrid_engine": refused(
        switched(
            max_out_tokens=integer(512),
            inference_tp_size=integer(1),
            release_inference_cache=flag(),
            pin_parameters=flag(True),
            tp_gather_partition_size=integer(8),
            enable_cuda_graph=flag(),
        ),
        "the engine generates by itself: call engine.generate(), and remove the section",
    ),
}
