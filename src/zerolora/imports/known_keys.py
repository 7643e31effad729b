"""The top-level keys of tools' training configs, by which a file's tool is detected.

They are the field names of the tools' argument classes. A test compares those of transformers with the installed
package.
"""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


TRAINING = _words(
    """
    accelerator_config activation_checkpointing activation_checkpointing_kwargs adam_beta1 adam_beta2 adam_epsilon
    auto_find_batch_size average_tokens_across_devices batch_eval_metrics bf16 bf16_full_eval data_seed
    dataloader_drop_last dataloader_in_order dataloader_multiprocessing_context dataloader_num_workers
    dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor ddp_backend ddp_broadcast_buffers
    ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph ddp_timeout debug deepspeed disable_tqdm do_eval
    do_predict do_train enable_jit_checkpoint eval_accumulation_steps eval_delay eval_do_concat_batches
    eval_on_start eval_steps eval_strategy eval_use_gather_object evaluation_strategy fp16 fp16_full_eval fsdp
    fsdp_config fsdp_transformer_layer_cls_to_wrap full_determinism generation_config generation_max_length
    generation_num_beams gradient_accumulation_steps gradient_checkpointing gradient_checkpointing_kwargs
    greater_is_better group_by_length half_precision_backend hub_always_push hub_model_id hub_private_repo
    hub_revision hub_strategy hub_token ignore_data_skip include_for_metrics include_inputs_for_metrics
    include_num_input_tokens_seen jit_mode_eval label_names label_smoothing_factor learning_rate length_column_name
    liger_kernel_config load_best_model_at_end local_rank log_level log_level_replica log_on_each_node logging_dir
    logging_first_step logging_nan_inf_filter logging_steps logging_strategy lr_scheduler_kwargs lr_scheduler_type
    max_grad_norm max_steps metric_for_best_model neftune_noise_alpha no_cuda num_train_epochs optim optim_args
    optim_target_modules output_dir overwrite_output_dir parallelism_config per_device_eval_batch_size
    per_device_train_batch_size predict_with_generate prediction_loss_only project push_to_hub push_to_hub_token
    remove_unused_columns report_to restore_callback_states_from_checkpoint resume_from_checkpoint run_name
    save_on_each_node save_only_model save_safetensors save_steps save_strategy save_total_limit seed
    skip_memory_metrics sortish_sampler tf32 torch_compile torch_compile_backend torch_compile_mode
    torch_empty_cache_steps torchdynamo trackio_bucket_id trackio_space_id trackio_static_space_id
    train_sampling_strategy use_cache use_cpu use_liger_kernel warmup_ratio warmup_steps weight_decay
    """
)
"""transformers: TrainingArguments and Seq2SeqTrainingArguments, including names of earlier versions."""
AXOLOTL = _words(
    """
    accelerator_config activation_offloading adam_beta1 adam_beta2 adam_beta3 adam_eps adam_epsilon adam_epsilon2
    adapter added_tokens_overrides attention attn_implementation auto_find_batch_size auto_resume_from_checkpoints
    base_model base_model_config base_model_ignore_patterns batch_flattening batch_size bench_dataset bench_split
    bf16 bfloat16 bnb_config_kwargs center_rewards_coefficient chat_template chat_template_jinja
    chat_template_kwargs chunked_cross_entropy chunked_cross_entropy_num_chunks cls_model_config comet_api_key
    comet_experiment_config comet_experiment_key comet_mode comet_online comet_project_name comet_workspace
    context_parallel_size cosine_constant_lr_ratio cosine_min_lr_ratio cpo_alpha curriculum_sampling
    cut_cross_entropy dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor
    dataset_exact_deduplication dataset_keep_in_memory dataset_num_proc dataset_prepared_path dataset_processes
    dataset_shard_idx dataset_shard_num datasets ddp ddp_broadcast_buffers ddp_bucket_cap_mb
    ddp_find_unused_parameters ddp_timeout debug deepcompile deepspeed default_system_message dense_mixer device
    device_map diffusion dion_lr dion_momentum dion_rank_fraction dion_rank_multiple_of do_bench_eval
    do_causal_lm_eval dp_replicate_size dp_shard_size dpo_beta dpo_generate_during_eval dpo_label_smoothing
    dpo_loss_type dpo_loss_weights dpo_norm_loss dpo_padding_free dpo_use_liger_kernel dpo_use_logits_to_keep
    dpo_use_weighting dsv4_bf16_all dsv4_fp4_grouped_mode dsv4_fp8_lora_kernel dsv4_fp8_nonexpert_mode
    dsv4_shared_mlp_lora_kernel dynamic_checkpoint eaft_alpha eaft_k eager_attention early_stopping_patience ebft
    embedding_lr embedding_lr_scale embeddings_skip_upcast eot_tokens eta_min eval_batch_size eval_causal_lm_metrics
    eval_max_new_tokens eval_sample_packing eval_sequence_len eval_steps eval_strategy eval_table_size
    evals_per_epoch evaluation_strategy excess_length_strategy experimental_skip_move_to_device expert_backend
    expert_parallel_backend expert_parallel_fallback_on_unsupported expert_parallel_num_nvl_bytes
    expert_parallel_num_rdma_bytes expert_parallel_size expert_parallel_token_capacity experts_implementation
    fix_untrained_tokens flash_attention flash_attn_cross_entropy flash_attn_d512 flash_attn_fuse_mlp
    flash_attn_fuse_qkv flash_attn_rms_norm flash_optimum flex_attention flex_attn_compile_kwargs float16 float32
    fp16 fp32_norm_classes fp32_norms fp8 fp8_enable_fsdp_float8_all_gather freeze_mm_modules fsdp fsdp_config
    fsdp_final_state_dict_type fsdp_version full_finetune fused_attn_kernel gc_collect_steps gc_steps
    gemma4_fp8_nonexpert gemma4_hybrid_attn_impl gemma4_nf4_nonexpert generate_samples generation_do_sample
    generation_max_new_tokens generation_prompt_ratio generation_temperature generation_top_k generation_top_p gptq
    gptq_disable_exllama gptq_groupsize gptq_model_v1 gpu_memory_limit gradient_accumulation_steps
    gradient_checkpointing gradient_checkpointing_kwargs gradio_max_new_tokens gradio_server_name gradio_server_port
    gradio_share gradio_temperature gradio_title greater_is_better grokfast_alpha grokfast_lamb group_by_length
    hatchery heads_k_stride hf_mlflow_log_artifacts hf_use_auth_token hub_model_id hub_revision hub_strategy
    image_resize_algorithm image_size include_tkps include_tokens_per_second is_falcon_derived_model
    is_llama_derived_model is_mistral_derived_model is_qwen_derived_model jagged_restart_anneal_steps
    jagged_restart_steps jagged_restart_warmup_steps kd_alpha kd_beta kd_ce_alpha kd_normalize_topk kd_online_server
    kd_online_server_base_url kd_online_timeout kd_online_topk kd_temperature kd_temperature_min kd_trainer
    kto_desirable_weight kto_undesirable_weight large_head_attention layer_offloading learning_rate
    liger_cross_entropy liger_fused_linear_cross_entropy liger_glu_activation liger_layer_norm liger_rms_norm
    liger_rms_norm_gated liger_rope liger_swiglu liger_use_token_scaling lisa_layers_attribute lisa_n_layers
    lisa_step_interval llama4_linearized_experts llmcompressor lm_eval_batch_size lm_eval_model lm_eval_post_train
    lm_eval_tasks load_best_model_at_end load_in_4bit load_in_8bit local_rank logging_steps lora_alpha
    lora_alpha_pattern lora_dropout lora_embedding_kernel lora_fan_in_fan_out lora_mlp_kernel lora_model_dir
    lora_modules_to_save lora_o_kernel lora_on_cpu lora_qkv_kernel lora_r lora_rank_pattern lora_target_linear
    lora_target_modules lora_target_parameters loraplus_lr_embedding loraplus_lr_ratio loss_watchdog_patience
    loss_watchdog_threshold low_cpu_mem_usage lr_div_factor lr_groups lr_quadratic_warmup lr_scheduler
    lr_scheduler_kwargs max_grad_norm max_memory max_packed_sequence_len max_prompt_len max_steps
    mean_resizing_embeddings merge_lora merge_method metric_for_best_model micro_batch_size min_sample_len
    mlflow_experiment_name mlflow_run_name mlflow_tracking_uri model_config model_quantization_config
    model_quantization_config_kwargs model_type moe_bnb_fast moe_dequant_chunk_size moe_grouped_backend mora
    multipack_real_batches neftune_noise_alpha nemo_gym_auto_clone nemo_gym_auto_start nemo_gym_config_paths
    nemo_gym_datasets nemo_gym_dir nemo_gym_enabled nemo_gym_head_port nemo_gym_max_turns nemo_gym_model_name
    nemo_gym_multi_turn nemo_gym_run_timeout nemo_gym_server_timeout nemo_gym_verify_timeout noisy_embedding_alpha
    nonexpert_quantization num_dataset_shards_to_save num_epochs num_generation_samples num_labels nvfp4_merge_aware
    nvfp4_merge_aware_start_step optim_args optim_target_modules optimizer orpo_alpha otel_metrics_host
    otel_metrics_port output_dir overrides_of_model_config overrides_of_model_kwargs pad_to_multiple_of
    pad_to_sequence_len peft peft_autocast_adapter_dtype peft_ensure_weight_tying peft_init_lora_weights
    peft_layer_replication peft_layers_pattern peft_layers_to_transform peft_trainable_token_indices peft_use_dora
    peft_use_rslora plugins pose_max_context_len pose_num_chunks pose_split_on_token_ids precompute_ref_log_probs
    preprocess_iterable pretrain_multipack_attn pretrain_multipack_buffer_size pretraining_dataset
    pretraining_sample_concatenation process_reward_model processor_kwargs processor_type profiler_steps
    profiler_steps_start push_dataset_to_hub qat qgalore_cos_threshold qgalore_gamma_proj qgalore_proj_bits
    qgalore_proj_group_size qgalore_proj_quant qgalore_proj_type qgalore_queue_size qgalore_rank qgalore_scale
    qgalore_update_proj_gap qlora_sharded_model_loading quantization quantize_moe_experts ray_num_workers
    ray_run_name recipe reinit_weights relora relora_anneal_steps relora_cpu_offload relora_prune_method
    relora_prune_ratio relora_steps relora_warmup_steps remove_unused_columns resize_token_embeddings_to_32x
    resources_per_worker resume_from_checkpoint revision_of_model reward_model ring_attn_func rl rl_beta
    role_boundaries rope_scaling rpo_alpha s2_attention sage_attention sample_packing sample_packing_bin_size
    sample_packing_eff_est sample_packing_group_size sample_packing_mp_start_method
    sample_packing_seq_len_multiplier sample_packing_sequentially save_compressed save_first_step save_only_model
    save_safetensors save_steps save_strategy save_total_limit saves_per_epoch scaling_softmax scaling_softmax_bias
    scaling_softmax_factor sdp_attention sdpa_varlen seed selective_checkpointing sequence_len
    sequence_parallel_degree shrink_embeddings shuffle_before_merging_datasets shuffle_merged_datasets simpo_gamma
    skip_prepare_dataset special_tokens spectrum_model_name spectrum_top_fraction streaming
    streaming_multipack_buffer_size strict swanlab_api_host swanlab_api_key swanlab_completion_log_interval
    swanlab_completion_max_buffer swanlab_description swanlab_experiment_name swanlab_lark_secret
    swanlab_lark_webhook_url swanlab_log_completions swanlab_log_model swanlab_mode swanlab_project swanlab_web_host
    swanlab_workspace tensor_parallel_size test_datasets tf32 tiled_mlp tiled_mlp_num_shards
    tiled_mlp_use_original_mlp tokenizer_config tokenizer_legacy tokenizer_save_jinja_files tokenizer_type
    tokenizer_use_fast tokenizer_use_mistral_common tokens torch_compile torch_compile_backend torch_compile_mode
    torch_compile_options torch_dtype torch_empty_cache_steps torchdistx_path total_num_tokens trackio_project_name
    trackio_run_name trackio_space_id train_on_inputs trainer_cls trl trust_remote_code type_of_model
    unfrozen_parameters use_comet use_dsv4_kernels use_eaft use_glm_dsa_kernels use_kernels use_mlflow
    use_onebitllms use_otel_metrics use_peft_dora use_pose use_ray use_scattermoe use_sonicmoe use_swanlab
    use_tensorboard use_trackio use_wandb val_set_size vllm wandb_entity wandb_log_model wandb_mode wandb_name
    wandb_project wandb_run_id wandb_watch warmup_ratio warmup_steps weight_decay xformers_attention
    """
)
"""axolotl: src/axolotl/utils/schemas/ and the integrations' arguments (067b021c)."""
LLAMAFACTORY = _words(
    """
    account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split adapter_folder adapter_name_or_path
    add_special_tokens add_tokens additional_target apollo_layerwise apollo_proj apollo_proj_type apollo_rank
    apollo_scale apollo_scale_front apollo_scale_type apollo_target apollo_update_interval apply_rope_fusion
    asft_alpha audio_sampling_rate badam_mask_mode badam_mode badam_start_block badam_switch_interval
    badam_switch_mode badam_update_ratio badam_verbose batch_size bias_activation_fusion block_diag_attn buffer_size
    cache_dir calculate_per_token_loss compute_accuracy compute_dtype context_parallel_size create_new_adapter
    crop_to_patches cross_entropy_loss_fusion cutoff_len data_shared_file_system dataset dataset_dir default_system
    device_map disable_gradient_checkpointing disable_shuffling do_sample double_quantization download_mode
    dpo_label_smoothing eaft_alpha early_stopping_steps enable_liger_kernel enable_thinking enable_torch_profiler
    eval_dataset eval_num_beams eval_on_each_dataset expert_model_parallel_size export_device export_dir
    export_hf_on_finish export_hub_model_id export_legacy_format export_quantization_bit export_quantization_dataset
    export_quantization_maxlen export_quantization_nsamples export_size extra_config finetuning_type flash_attn fp8
    fp8_backend fp8_enable_fsdp_float8_all_gather freeze_extra_modules freeze_language_model
    freeze_multi_modal_projector freeze_trainable_layers freeze_trainable_modules freeze_vision_tower
    galore_layerwise galore_proj_type galore_rank galore_scale galore_target galore_update_interval hf_hub_token
    hyper_parallel_args hyper_parallel_cp_size ignore_pad_token_for_loss image_do_pan_and_scan image_max_pixels
    image_min_pixels include_effective_tokens_per_second infer_backend infer_dtype init_special_tokens
    interleave_probs kt_config kt_cpu_activation kt_expert_checkpoint_path kt_lora_expert_intermediate_size
    kt_lora_expert_num kt_non_expert_weight_path kt_use_lora_experts kt_weight_path kto_chosen_weight
    kto_rejected_weight lang ld_alpha length_penalty lora_alpha lora_dropout lora_rank lora_target
    loraplus_lr_embedding loraplus_lr_ratio low_cpu_mem_usage mask_history masked_softmax_fusion master_addr
    master_port max_length max_new_tokens max_samples media_dir megatron_bridge_args megatron_pretrained_checkpoint
    mix_strategy mixed_precision mixture_of_depths model_max_length model_name_or_path model_revision module_dropout
    moe_aux_loss_coef moe_grouped_gemm moe_token_dispatcher_type ms_hub_token n_shot neat_packing
    new_special_tokens_config num_beams offload_folder oft_block_size oft_rank oft_target om_hub_token
    overlap_grad_reduce overlap_param_gather overwrite_cache packing pipeline_model_parallel_size pissa_convert
    pissa_init pissa_iter placement_strategy plot_loss ppo_buffer_size ppo_epochs ppo_score_norm ppo_target
    ppo_whiten_rewards pref_bco_weight pref_beta pref_ftx pref_loss preprocessing_batch_size
    preprocessing_num_workers preserve_thinking print_param_status profile_modules profiler_active_steps
    profiler_output_dir profiler_profile_memory profiler_record_shapes profiler_repeat profiler_wait_steps
    profiler_warmup_steps profiler_with_stack pure_bf16 quantization_bit quantization_device_map quantization_method
    quantization_type ray_init_kwargs ray_num_workers ray_run_name ray_storage_path recompute_granularity
    recompute_method recompute_num_layers ref_model ref_model_adapters ref_model_quantization_bit repetition_penalty
    resize_vocab resources_per_worker reward_model reward_model_adapters reward_model_quantization_bit
    reward_model_type rope_scaling save_dir sequence_parallel sglang_config sglang_lora_backend sglang_maxlen
    sglang_mem_fraction sglang_tp_size shift_attn simpo_gamma skip_special_tokens split_special_tokens stage
    streaming swanlab_api_key swanlab_lark_secret swanlab_lark_webhook_url swanlab_logdir swanlab_mode
    swanlab_project swanlab_run_name swanlab_workspace task task_dir temperature template tensor_model_parallel_size
    tokenized_path tool_format top_k top_p train_from_scratch train_on_prompt trust_remote_code upcast_layernorm
    upcast_lmhead_output use_adam_mini use_apollo use_asft_loss use_audio_in_video use_badam use_dft_loss
    use_distributed_optimizer use_dora use_eaft_loss use_fast_tokenizer use_galore use_hyper_parallel use_kt
    use_kv_cache use_llama_pro use_mca use_megatron_bridge use_muon use_packed_sequences use_reentrant_gc use_rslora
    use_swanlab use_unsloth use_unsloth_gc use_v1_kernels val_size video_fps video_max_pixels video_maxlen
    video_min_pixels virtual_pipeline_model_parallel_size vllm_config vllm_enforce_eager vllm_gpu_util
    vllm_max_lora_rank vllm_maxlen
    """
)
"""LLaMA-Factory: src/llamafactory/hparams/ (ff6d4d12)."""
TRL = _words(
    """
    activation_offloading alpha assistant_only_loss attn_implementation auto_insert_empty_system_msg batch_size
    benchmarks beta beta1 beta2 bnb_4bit_quant_storage bnb_4bit_quant_type cache_implementation callbacks
    cast_lm_head_to_fp32 center_rewards_coefficient chat_template chat_template_kwargs chat_template_path cliprange
    cliprange_value code_eval_scoring_mode code_eval_test_batch_size code_language code_provider columns
    completion_only_loss config cosine_max_len cosine_max_value_correct cosine_max_value_wrong
    cosine_min_value_correct cosine_min_value_wrong cpo_alpha data_dir data_files dataset_config dataset_config_name
    dataset_configs dataset_kwargs dataset_mixer dataset_mixture dataset_name dataset_num_proc dataset_prompt_column
    dataset_splits dataset_streaming dataset_test_split dataset_text_field dataset_train_split datasets delta
    desirable_weight diagnostics_flat_tolerance diagnostics_warning_interval disable_dropout discopop_tau
    distillation_add_tail distillation_alpha distillation_is_clip distillation_mode distillation_objective
    distillation_topk distillation_weight dont_reprompt_on_self_success ds3_gather_for_generation dtype
    e2b_router_url entropy_coef entropy_coef_delta entropy_coef_max entropy_coef_min entropy_target
    environment_feedback_only_without_solution eos_token epsilon epsilon_high eval_packing f_alpha_divergence_coef
    f_divergence_type feedback_template filter_all_incorrect filter_empty fork_threshold_tokens fraction gamma
    generate_during_eval generate_from_teacher generation_batch_size generation_kwargs heartbeat_stale_after_s
    hub_model_revision ignore_bias_buffers importance_sampling_level include_environment_feedback ioi_provider
    is_encoder_decoder iw_opd_epsilon iw_opd_gamma kd_temperature kl_coef kl_estimator label_smoothing ld_alpha
    length_normalization lmbda load_in_4bit load_in_8bit local_batch_size local_mini_batch_size
    local_rollout_forward_batch_size log_completions log_completions_hub_repo log_completions_steps log_multimodal
    log_unique_prompts lora_alpha lora_dropout lora_modules_to_save lora_r lora_target_modules
    lora_target_parameters lora_task_type loss_add_tail loss_top_k loss_type loss_weights mask_truncated_completions
    max_completion_len max_completion_length max_density_ratio max_inflight_tasks max_length max_new_tokens
    max_prompt_length max_reprompt_len max_seq_length max_staleness max_tool_calling_iterations micro_batch_size
    min_density_ratio min_p mini_batch_size missing_eos_penalty mixture_coef model_adapter_name model_init_kwargs
    model_name_or_path model_revision morph_router_url multi_objective_aggregation normalize_advantages
    num_completions_to_print num_generations num_generations_eval num_iterations num_loss_tokens_to_skip
    num_mini_batches num_ppo_epochs num_sample_generations num_total_batches num_value_samples
    off_policy_mask_threshold overwrite_hub_revision packing packing_strategy pad_to_multiple_of pad_token
    padding_free padding_value parallel_code_exec_per_proc precompute_ref_batch_size precompute_ref_log_probs
    preprocessing_num_workers prompt_sample_size push_to_hub_revision queue_maxsize ref_adapter_name ref_model
    ref_model_mixup_alpha ref_model_sync_steps remove_thinking_from_demonstration repetition_max_penalty
    repetition_n_grams repetition_penalty replay_buffer_size reprompt_template request_timeout response_length
    reverse_kl_top_1_mode reward_clip_range reward_funcs reward_model_path reward_weights rkl_advantage
    router_aux_loss_coef sapo_temperature_neg sapo_temperature_pos scale_rewards seq_kd sft_model_path
    shuffle_dataset simpo_gamma single_step_decomposition soft_punish_cache solution_template step_separator
    steps_per_generation stop_token stop_token_id streaming success_reward_threshold sync_ref_model system_prompt
    teacher_model_init_kwargs teacher_model_kind teacher_model_name_or_path teacher_model_revision
    teacher_model_server_url teacher_prompt_template teacher_sync_steps teacher_tokenizer_name_or_path
    teacher_update_rate temperature test_split_size token_budget tokenizer_name_or_path top_entropy_quantile top_k
    top_p torch_dtype total_episodes tpo_alpha tpo_l_gamma train_on_last_step_only
    transformers_continuous_batching_config truncation_mode trust_remote_code uld_crossentropy_weight
    uld_distillation_weight uld_hybrid_matched_weight uld_hybrid_unmatched_weight uld_skip_student_eos
    uld_skip_teacher_eos uld_student_temperature uld_teacher_temperature uld_token_merge_strategy
    uld_use_hybrid_loss undesirable_weight use_adaptive_entropy use_bias_correction_kl use_bnb_nested_quant use_dora
    use_extended_uld use_flash_attention_2 use_peft use_rslora use_successful_as_teacher use_teacher_server
    use_transformers_continuous_batching use_transformers_paged use_uld_loss use_vllm use_weighting vespo_k_neg
    vespo_k_pos vespo_lambda_neg vespo_lambda_pos vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_group_port
    vllm_importance_sampling_cap vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min
    vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_max_model_length vllm_mode
    vllm_model_impl vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout
    vllm_structured_outputs_regex vllm_sync_frequency vllm_tensor_parallel_size wandb_entity
    wandb_log_unique_prompts wandb_project wandb_run_group weight_sync_steps whiten_rewards world_size
    """
)
"""TRL, alignment-handbook and open-r1: configs and scripts."""
SWIFT = _words(
    """
    acc_strategy adalora_beta1 adalora_beta2 adalora_deltaT adalora_init_r adalora_orth_reg_weight adalora_target_r
    adalora_tfinal adalora_tinit adapter_act adapter_length adapters add_non_thinking_prefix add_version
    agent_template aligner_lr api_key attention_backend attn_impl base_url beta bnb_4bit_compute_dtype
    bnb_4bit_quant_storage bnb_4bit_quant_type bnb_4bit_use_double_quant boft_block_num boft_block_size boft_dropout
    boft_n_butterfly_factor cache_files cached_dataset cached_val_dataset callbacks center_rewards_coefficient
    check_model cliprange cliprange_value columns commit_message context_manager cpo_alpha create_checkpoint_symlink
    cross_entropy_loss_fusion custom_dataset_info custom_register_path data_range dataset dataset_num_proc
    dataset_shuffle deepspeed_autotp_size desirable_weight device_map disable_auto_column_mapping
    disable_ignore_empty_think discopop_tau download_mode ds3_gather_for_generation early_stop_interval
    easy_query_threshold enable_channel_loss enable_dft_loss enable_npu_model_patch enable_thinking engine_kwargs
    eval_backend eval_dataset eval_dataset_args eval_generation_config eval_limit eval_metric eval_num_proc
    eval_output_dir eval_url eval_use_evalscope exist_ok expert_model_parallel_size experts_impl external_plugins
    extra_eval_args finetune fourier_n_frequency fourier_scaling freeze_aligner freeze_llm freeze_parameters
    freeze_parameters_ratio freeze_parameters_regex freeze_vit galore_cos_threshold galore_gamma_proj
    galore_optim_per_parameter galore_proj_bits galore_proj_group_size galore_proj_quant galore_proj_type
    galore_quantization galore_queue_size galore_rank galore_scale galore_target_modules galore_update_proj_gap
    galore_with_embedding gamma gkd_logits_topk global_batch_size group_size gym_env host hqq_axis ignore_args_error
    infer_backend init_strategy init_weights interleave_prob is_binary_loss_scale is_multimodal kl_coef
    label_smoothing lam lang lazy_tokenize ld_alpha lisa_activated_layers lisa_step_interval llamapro_num_groups
    llamapro_num_new_blocks lmbda lmdeploy_cache_max_entry_count lmdeploy_quant_policy lmdeploy_session_len
    lmdeploy_tp lmdeploy_vision_batch_size load_args load_data_args load_from_cache_file local_dataset
    local_repo_path local_rollout_forward_batch_size log_completions log_interval logprobs lora_alpha lora_bias
    lora_dropout lora_dtype lora_ga_batch_size lora_ga_direction lora_ga_iters lora_ga_max_length lora_ga_scale
    lora_ga_stable_gamma lora_rank lora_target_modules lorap_lr_ratio loss_scale loss_type loss_weights lr
    lr_warmup_fraction max_batch_size max_completion_length max_epochs max_length max_logprobs max_memory
    max_model_len max_new_tokens max_pixels max_shard_size max_turns mcore_adapter mcore_model merge_lora metric
    micro_batch_size min_lr missing_eos_penalty model model_author model_id_or_path model_kwargs model_name
    model_revision model_type modules_to_save moe_aux_loss_coeff moe_grouped_gemm moe_permute_fusion
    moe_shared_expert_overlap mrl_dims multi_turn_scheduler n_best_to_keep new_special_tokens no_save_optim
    no_save_rng norm_bbox num_beams num_generations num_iterations num_labels num_mini_batches num_ppo_epochs
    num_return_sequences num_sample_generations num_sampling_batch_size num_sampling_batches offload_teacher_model
    optimizer orm_model output_file override_exist_file owned_by packing packing_length packing_num_proc
    packing_strategy padding_free padding_side pipeline_model_parallel_size port preserve_thinking prm_model
    prm_threshold problem_type quant_batch_size quant_bits quant_method quant_n_samples recompute_granularity
    recompute_method recompute_num_layers ref_adapters ref_model ref_model_revision ref_model_type reft_args
    reft_intervention_type reft_layer_key reft_layers reft_rank repetition_penalty reranker_use_activation
    response_length response_prefix result_path resume resume_only_model reward_adapters reward_funcs reward_model
    reward_model_revision reward_model_type reward_template reward_weights rlhf_type rope_scaling
    router_aux_loss_coef rpo_alpha safe_serialization sampler_engine sampler_type save_interval save_missing_weights
    seq_kd sequence_parallel sequence_parallel_size served_model_name server_name server_port sft_alpha sft_type
    sglang_context_length sglang_disable_cuda_graph sglang_disable_custom_all_reduce sglang_dp_size
    sglang_enable_dp_attention sglang_enable_ep_moe sglang_ep_size sglang_kv_cache_dtype sglang_mem_fraction_static
    sglang_pp_size sglang_quantization sglang_speculative_algorithm sglang_speculative_eagle_topk
    sglang_speculative_num_draft_tokens sglang_speculative_num_steps sglang_tp_size share shuffle_buffer_size
    simpo_gamma split_dataset_ratio ssl_certfile ssl_keyfile stop_words stopping_strategy stream streaming strict
    structured_outputs_regex studio_title swanlab_email_language swanlab_exp_name swanlab_mode
    swanlab_notification_method swanlab_project swanlab_receiver_email swanlab_secret swanlab_sender_email
    swanlab_smtp_port swanlab_smtp_server swanlab_token swanlab_webhook_url swanlab_workspace system target_modules
    target_parameters target_regex task_type teacher_adapters teacher_deepspeed teacher_model teacher_model_revision
    teacher_model_server teacher_model_type temperature template template_backend template_mode template_type
    tensor_model_parallel_size test_convert_dtype test_convert_precision thread_count to_cached_dataset to_hf
    to_mcore to_ollama to_peft_format top_k top_logprobs top_p torch_dtype train_dataloader_shuffle
    train_dataset_sample train_iters train_type trainable_parameters trainable_parameters_regex truncation_strategy
    tuner_backend tuner_type undesirable_weight use_chat_template use_dora use_flash_ckpt use_galore use_gym_env
    use_hf use_logits_to_keep use_rslora use_swift_lora val_dataset val_dataset_sample val_dataset_shuffle
    vera_d_initial vera_dropout vera_projection_prng_key vera_rank verbose vf_coef vit_gradient_checkpointing vit_lr
    vllm_enable_lora vllm_max_lora_rank vllm_use_async_engine whiten_rewards write_batch_size
    zero_hpz_partition_size
    """
)
"""ms-swift: swift/arguments/ (3602360a), and its most common Megatron arguments."""
MULTIMODAL_TEMPLATES = _words(
    """
    dots_ocr ernie_vl gemma3n gemma4 gemma4n glm4_5v glm4v glm_ocr granite3_vision intern_s1 intern_vl keye_vl
    kimi_vl lfm2_vl llama4 llava llava_next llava_next_llama3 llava_next_mistral llava_next_qwen llava_next_video
    llava_next_video_mistral llava_next_video_yi llava_next_yi mimo_vl minicpm_o minicpm_v minicpm_v_4_6 ministral3
    mistral_small mllama moss_vl paligemma paligemma_chat pixtral qwen2_audio qwen2_omni qwen2_vl qwen3_5
    qwen3_5_nothink qwen3_6 qwen3_omni qwen3_omni_nothink qwen3_vl qwen3_vl_nothink video_llava yi_vl youtu_vl
    """
)
"""LLaMA-Factory's templates with a plugin for images, video or audio (data/template.py), except gemma3."""
