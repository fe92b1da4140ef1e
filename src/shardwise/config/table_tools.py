"""The known keys of tuning, storage, data and compression that are not honoured."""

from __future__ import annotations

from shardwise.config.keys import Group, flag, integer, items, not_yet, number, refused, switched, text

_CURRICULUM = switched(
    curriculum_type=text(),
    min_difficulty=integer(),
    max_difficulty=integer(),
    schedule_type=text(),
    schedule_config=Group(open=True),
)

_DATA_SAMPLING = switched(
    num_epochs=integer(1000),
    num_workers=integer(0),
    pin_memory=flag(),
    curriculum_learning=switched(data_cluster_path=text(), curriculum_metrics=Group(open=True)),
    dynamic_batching=switched(
        metrics_path=text(),
        lr_scaling_method=text(),
        min_batch_size=integer(1),
        max_batch_size=integer(),
        sequence_picking_order=text(),
        max_tokens=integer(),
        verbose=flag(),
    ),
)

_RANDOM_LTD = switched(
    total_layer_num=integer(),
    random_ltd_layer_num=integer(),
    random_ltd_layer_id=items(),
    model_mask_name=text(),
    model_type=text(),
    hidden_state_order=text(),
    random_ltd_schedule=Group(
        {
            "min_value": integer(),
            "max_value": integer(),
            "schedule_type": text(),
            "schedule_config": Group({"require_steps": integer(), "seq_per_step": integer()}),
        }
    ),
    layer_token_lr_schedule=switched(total_layer_tokens=integer(), warmup_type=text(), warmup_layer_tokens=integer()),
)

_COMPRESSION = Group(
    {"shared_parameters": switched(open=True), "different_groups": Group(open=True)},
    switch="shared_parameters.enabled",
)


_SECTIONS: dict[str, Group] = {
    "flops_profiler": switched(
        profile_step=integer(1),
        module_depth=integer(-1),
        top_modules=integer(1),
        detailed=flag(True),
        output_file=text(),
        recompute_fwd_factor=number(0.0),
    ),
    "checkpoint": Group(
        {
            "tag_validation": text("WARN", "Warn", "warn"),
            "load_universal": flag(),
            "use_node_local_storage": flag(),
            "parallel_write": Group({"pipeline_stage": flag()}),
            "checkpoint_serialization": flag(True),
            "writer": Group(
                {
                    "type": text(),
                    "decoupled": flag(),
                    "io_buffer_size": integer(67108864),
                    "io_buffer_double": flag(True),
                    "show_statistics": flag(),
                    "data_parallel": text(),
                    "io_multiplier": integer(1),
                },
                request=True,
            ),
        }
    ),
    "aio": Group(
        {
            "block_size": integer(1048576),
            "queue_depth": integer(8),
            "intra_op_parallelism": integer(1),
            "single_submit": flag(),
            "overlap_events": flag(True),
            "use_gds": flag(),
        }
    ),
    "elasticity": switched(
        max_train_batch_size=integer(2000),
        micro_batch_sizes=items([2, 4, 6]),
        min_gpus=integer(1),
        max_gpus=integer(10000),
        min_time=number(0),
        prefer_larger_batch=flag(True),
        ignore_non_elastic_batch_info=flag(),
        version=number(0.2),
        num_gpus_per_node=integer(1),
        model_parallel_size=integer(1),
    ),
    "autotuning": switched(
        fast=flag(True),
        results_dir=text(),
        exps_dir=text(),
        overwrite=flag(True),
        start_profile_step=integer(3),
        end_profile_step=integer(5),
        metric=text("throughput"),
        metric_path=text(),
        tuner_type=text("gridsearch"),
        tuner_early_stopping=integer(5),
        tuner_num_trials=integer(50),
        arg_mappings=Group(open=True),
        model_info=Group(
            {"profile": flag(), "num_params": integer(), "hidden_size": integer(), "num_layers": integer()}
        ),
        model_info_path=text(),
        mp_size=integer(1),
        max_train_batch_size=integer(),
        min_train_batch_size=integer(1),
        max_train_micro_batch_size_per_gpu=integer(1024),
        min_train_micro_batch_size_per_gpu=integer(1),
        num_tuning_micro_batch_sizes=integer(3),
    ),
    "data_efficiency": switched(
        seed=integer(1234), data_sampling=_DATA_SAMPLING, data_routing=switched(random_ltd=_RANDOM_LTD)
    ),
    "curriculum_learning": _CURRICULUM,
    "progressive_layer_drop": switched(theta=number(1.0), gamma=number(0.001)),
    "eigenvalue": switched(
        verbose=flag(),
        max_iter=integer(100),
        tol=number(1e-2),
        stability=number(1e-6),
        gas_boundary_resolution=integer(1),
        layer_name=text("bert.encoder.layer"),
        layer_num=integer(0),
    ),
    "sparse_attention": Group(
        {
            "mode": text("dense"),
            "block": integer(16),
            "different_layout_per_head": flag(),
            "num_local_blocks": integer(4),
            "num_global_blocks": integer(1),
            "attention": text("bidirectional"),
            "horizontal_global_attention": flag(),
            "num_different_global_patterns": integer(1),
            "num_random_blocks": integer(0),
            "local_window_blocks": items([4]),
            "global_block_indices": items([0]),
            "global_block_end_indices": items(),
            "num_sliding_window_blocks": integer(3),
        },
        switch="mode",
        off=("dense",),
        absent="fixed",
    ),
    "compression_training": Group(
        {
            "layer_reduction": switched(
                keep_number_layer=integer(),
                module_name_prefix=text(),
                teacher_layer=items(),
                other_module_name=items(),
            ),
            "weight_quantization": _COMPRESSION,
            "activation_quantization": _COMPRESSION,
            "sparse_pruning": _COMPRESSION,
            "row_pruning": _COMPRESSION,
            "head_pruning": _COMPRESSION,
            "channel_pruning": _COMPRESSION,
        }
    ),
    "weight_quantization": Group({"quantized_initialization": Group(open=True), "post_init_quant": Group(open=True)}),
    "nebula": switched(
        load_path=text(),
        enable_nebula_load=flag(True),
        persistent_storage_path=text(),
        persistent_time_interval=integer(100),
        num_of_version_in_retention=integer(2),
    ),
    "datastates_ckpt": Group(open=True),
    "quantize_training": switched(open=True),
}

_NOT_YET = {
    "flops_profiler": "the profiler",
    "checkpoint": "the checkpoint writer",
    "aio": "offloading to NVMe",
    "autotuning": "the planner",
}

_SAMPLES = "which samples a step sees is the script's choice; give the loop a loader that does this, and remove the key"
_REFUSED = {
    "elasticity": (
        "batch sizes do not change behind your back; write train_batch_size, which keeps the batch at any number of "
        "ranks, and start with `shardwise launch --nnodes MIN:MAX`"
    ),
    "data_efficiency": _SAMPLES,
    "curriculum_learning": _SAMPLES,
    "progressive_layer_drop": "it changes the model's forward; drop layers in the model itself, and remove the section",
    "eigenvalue": "it only served quantize_training, which does not exist here; remove the section",
    "sparse_attention": 'it needs kernels of its own; write "flashattention": {"enable": true} or remove the section',
    "compression_training": "it changes the model; prune or quantize with torchao before initialize, and remove it",
    "weight_quantization": "it changes the model's weights; quantize with torchao, and remove the section",
    "nebula": "the service is gone; remove the section, checkpoints will be asynchronous by themselves",
    "datastates_ckpt": "it is another library's checkpoint writer; remove the section",
    "quantize_training": "it changes the model's weights in training; quantize with torchao, and remove the section",
}

TOOLS: dict[str, Group] = {
    name: not_yet(group, _NOT_YET[name]) if name in _NOT_YET else refused(group, _REFUSED[name])
    for name, group in _SECTIONS.items()
}
