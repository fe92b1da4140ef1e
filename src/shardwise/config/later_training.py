"""The known keys of training and parallelism that have not landed, and their inert values."""

from __future__ import annotations

from shardwise.config.keys import Group, Key, anything, flag, integer, items, number, switched, text

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
)

_ZERO = Group(
    {
        "offload_param": _OFFLOAD_PARAM,
        "offload_optimizer": _OFFLOAD_OPTIMIZER,
        "cpu_offload": flag(),
        "cpu_offload_param": flag(),
        "cpu_offload_use_pin_memory": flag(),
        "use_multi_rank_bucket_allreduce": flag(True),
        "load_from_fp32_weights": flag(True),
        "elastic_checkpoint": flag(),
        "zenflow": Group(
            {
                "topk_ratio": number(),
                "select_strategy": text("auto"),
                "select_interval": anything("auto"),
                "update_interval": anything("auto"),
                "overlap_step": flag(),
                "offload": flag(),
                "auto_ratio": number(),
                "full_warm_up_rounds": integer(),
                "pt_reserved_cores_perc": number(),
            },
            request=True,
        ),
        "stage3_module_granularity_threshold": integer(0),
        "stage3_use_all_reduce_for_fetch_params": flag(),
        "stage3_allgather_sequential": flag(),
        "legacy_stage1": flag(),
        "round_robin_gradients": flag(),
        "zero_quantized_weights": flag(),
        "zero_quantized_nontrainable_weights": flag(),
        "zero_quantized_gradients": flag(),
        "zeropp_loco_param": Group({"err_beta": number(), "reset_T": integer()}, request=True),
        "mics_hierarchical_params_gather": flag(),
        "memory_efficient_linear": flag(True, False),
        "pipeline_loading_checkpoint": flag(),
        "override_module_apply": flag(True),
        "log_trace_cache_warnings": flag(),
        "enable_sanity_checks": flag(),
        "save_muon_momentum_buffer_in_memory": flag(),
    },
    honoured=True,
)


TRAINING: dict[str, Key | Group] = {
    "optimizer": Group({"legacy_fusion": flag()}, honoured=True),
    "fp16": Group({"fp16_master_weights_and_grads": flag()}, honoured=True),
    "bf16": Group({"bf16_master_weights_and_grads": flag(), "bf16_optimizer_states": flag()}, honoured=True),
    "zero_optimization": _ZERO,
    "managed_gradient_accumulation": flag(True),
    "seq_parallel_communication_data_type": text("fp32"),
    "prescale_gradients": flag(),
    "gradient_predivide_factor": number(1.0),
    "gradient_allreduce_op": text("mean"),
    "sparse_gradients": flag(),
    "disable_allgather": flag(),
    "sequence_parallel_size": integer(1),
    "data_parallel_size": integer(),
    "graph_harvesting": flag(),
    "use_data_before_expert_parallelism": flag(),
    "amp": switched(open=True),
    "msamp": switched(open=True),
    "data_types": Group({"grad_accum_dtype": text(), "param_dtype": text(), "buffer_dtype": text()}),
    "activation_checkpointing": Group(
        {
            "partition_activations": flag(),
            "cpu_checkpointing": flag(),
            "contiguous_memory_optimization": flag(),
            "number_checkpoints": integer(),
            "synchronize_checkpoint_boundary": flag(),
            "profile": flag(),
        }
    ),
    "pipeline": Group(
        {
            "stages": anything("auto"),
            "partition": text("best"),
            "seed_layers": flag(),
            "activation_checkpoint_interval": integer(0),
            "pipe_partitioned": flag(True),
            "grad_partitioned": flag(True),
            "use_reentrant": flag(True),
        }
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
        }
    ),
    "expert_parallel": switched(
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
    "compile": Group(
        {
            "deepcompile": flag(),
            "passes": items(),
            "free_activation": flag(),
            "free_activation_threshold": integer(10 * 2**20),
            "offload_activation": flag(),
            "offload_activation_pin_memory": flag(True),
            "offload_opt_states": flag(),
            "offload_parameters": flag(),
            "double_buffer": flag(True),
            "symmetric_memory": flag(),
            "debug_log": flag(),
            "sync_before_reduce": flag(),
            "sync_after_reduce": flag(),
            "sync_before_allgather": flag(),
            "sync_after_allgather": flag(),
            "keep_int_input_tensors": flag(True),
            "keep_all_input_tensors": flag(),
        },
        switch="deepcompile",
    ),
    "hybrid_engine": switched(
        max_out_tokens=integer(512),
        inference_tp_size=integer(1),
        release_inference_cache=flag(),
        pin_parameters=flag(True),
        tp_gather_partition_size=integer(8),
        enable_cuda_graph=flag(),
    ),
}

# Inside optimizer.params, for Adam and AdamW only: arguments of the upstream implementations.
LATER_ADAM_PARAMS = Group({"bias_correction": flag(True), "fp32_optimizer_states": flag(True)}, honoured=True)

LATER_OPTIMIZERS = (
    "Lamb",
    "Lion",
    "Muon",
    "OneBitAdam",
    "OneBitLamb",
    "ZeroOneAdam",
    "MuAdam",
    "MuAdamW",
    "MuSGD",
)
