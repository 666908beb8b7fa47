"""Every mistake gets a sentence that names the culprit and a remedy, exit code 2, and no
traceback.
"""

import pytest

from maxtext.cli.main import main

MOE = ["decoder_block=mixtral", "num_experts=8", "num_experts_per_tok=2"]
LATENT = ["decoder_block=deepseek", "attention_type=mla"]
INDEXED = [*LATENT, "use_indexer=true", "q_lora_rank=8"]
MEMORY = ["engram_layers=[0]", "engram_vocab_bases=[20, 20]"]
GRPO = ["grpo", "model_name=llama2-7b"]

# words after `maxtext config`, and what the message must say
CASES = {
    "packing of a source with its own": (
        ["dataset_type=c4_mlperf", "grain_packing_type=best_fit"],
        [
            "grain_packing_type=best_fit (command line) would do nothing",
            "a dataset_type other than c4_mlperf",
        ],
    ),
    "an unpacked benchmark": (["dataset_type=c4_mlperf", "packing=false"], ["leave packing=true"]),
    "special tokens for tokens": (
        ["dataset_type=olmo_grain", "add_bos=false"],
        ["a dataset_type other than olmo_grain"],
    ),
    "readers that do not divide": (
        ["expansion_factor_real_data=1.5"],
        ["expansion_factor_real_data=1.5 does not divide"],
    ),
    "no drafted tokens": (
        ["speculative_method=ngram", "num_speculative_tokens=0"],
        ["num_speculative_tokens=0 is out of range: it must be between 1 and 32"],
    ),
    "drafts without a method": (
        ["num_speculative_tokens=3"],
        ["num_speculative_tokens=3", "it needs speculative_method"],
    ),
    "a draft model that nothing asks": (
        ["speculative_method=ngram", "speculative_model_path=draft"],
        ["speculative_model_path=draft", "it needs speculative_method=draft"],
    ),
    "drafts without their model": (
        ["speculative_method=draft"],
        ["speculative_method=draft needs a model that drafts: set speculative_model_path"],
    ),
    "an EAGLE-3 head without a folder": (
        ["speculative_method=eagle3"],
        ["speculative_method=eagle3 needs a head that drafts: set speculative_model_path"],
    ),
    "an unknown proposer": (
        ["speculative_method=medusa"],
        ["speculative_method='medusa' is not known", "ngram, draft"],
    ),
    "n-grams in the wrong order": (
        ["speculative_method=ngram", "prompt_lookup_min=5"],
        ["prompt_lookup_min=5 must not be above prompt_lookup_max=4"],
    ),
    "drafts for rollouts": (
        [*GRPO, "speculative_method=ngram"],
        ["speculative_method=ngram is for serving"],
    ),
    "less than no bad records": (["max_bad_records=-2"], ["max_bad_records"]),
    "a group of one": ([*GRPO, "num_generations=1"], ["set at least 2"]),
    "a way to sample that is not there": (
        [*GRPO, "eval_sampling_strategy=beam"],
        ["'beam' is not known: use one of greedy, standard, liberal"],
    ),
    "evaluation that ends before it begins": (
        [*GRPO, "num_test_batches=1", "test_batch_start_index=8"],
        ["test_batch_start_index=8 is not below num_test_batches=1 times batch_size=8"],
    ),
    "microbatches of two sizes": (
        [*GRPO, "train_micro_batch_size=2", "gradient_accumulation_steps=2"],
        ["train_micro_batch_size=2, which makes 4 microbatches of batch_size=8: set one"],
    ),
    "dropout of sampled tokens": (
        [*GRPO, "lora_rank=4", "lora_dropout=0.1"],
        ["lora_dropout=0.1 would give sampled tokens other log-probabilities"],
    ),
    "two functions of rows": (
        [*GRPO, "dataset_processor_path=a.py", "formatting_func_path=b.py:f"],
        ["dataset_processor_path", "set one"],
    ),
    "rows of no reinforcement learning": (
        ["dataset_processor_path=a.py"],
        ["dataset_processor_path=a.py", "it needs use_grpo=true"],
    ),
    "a batch of no problem": ([*GRPO, "eval_batch_size=0"], ["at least 1, or -1"]),
    "slices of the sampler alone": (
        [*GRPO, "num_samplers_slices=1"],
        ["num_trainer_slices=-1 and num_samplers_slices=1: set both, or neither"],
    ),
    "chunks of weights that nobody copies": (
        [*GRPO, "reshard_chunk_size=8"],
        ["reshard_chunk_size=8", "it needs a sampler with devices of its own"],
    ),
    "rollouts ahead without the loop that has them": (
        [*GRPO, "off_policy_steps=2"],
        ["off_policy_steps=2", "it needs use_agentic_rollout=true"],
    ),
    "no memory for a model": (
        ["gpu_memory_utilization=0"],
        ["gpu_memory_utilization=0 leaves no memory: set it above 0 and at most 1"],
    ),
    "more than all memory": (
        ["kv_cache_memory_fraction=1.5"],
        ["kv_cache_memory_fraction=1.5 is out of range", "between 0 and 1"],
    ),
    "memory of requests for rollouts": (
        [*GRPO, "kv_cache_memory_fraction=0.5"],
        ["kv_cache_memory_fraction=0.5", "hbm_utilization_vllm limits the caches of rollouts"],
    ),
    "devices of no sampler": (
        ["sampler_devices_fraction=0.25"],
        ["sampler_devices_fraction=0.25", "it needs use_grpo=true"],
    ),
    "weight of a teacher that is not there": (
        ["distill_alpha=0.3"],
        ["distill_alpha=0.3 (command line) would do nothing: it needs a teacher"],
    ),
    "student without a teacher": (
        ["student_overrides.dtype=float32"],
        ["student_overrides={'dtype': 'float32'}", "set teacher_overrides"],
    ),
    "schedule without an end": (
        ["teacher_overrides.model_name=llama2-7b", "distill_alpha_schedule=linear"],
        ["distill_alpha_schedule=linear has no end: set distill_alpha_end"],
    ),
    "end without a schedule": (
        ["teacher_overrides.model_name=llama2-7b", "distill_temperature_end=2"],
        ["distill_temperature_end=2.0 is not reached", "distill_temperature_schedule=linear"],
    ),
    "features that start from nothing": (
        [
            "teacher_overrides.model_name=llama2-7b",
            "distill_beta_end=1",
            "distill_beta_schedule=linear",
        ],
        ["distill_beta=0 turns features off", "start from a small distill_beta"],
    ),
    "layers of no features": (
        ["teacher_overrides.model_name=llama2-7b", "distill_layer_indices=[0]"],
        ["distill_layer_indices=[0]", "it needs distill_beta above 0"],
    ),
    "negative layer": (
        ["teacher_overrides.model_name=llama2-7b", "distill_beta=1", "distill_layer_indices=[-1]"],
        ["distill_layer_indices=[-1] must be a list of layer numbers from 0"],
    ),
    "no parameter to update": (
        ["use_sft=true", "student_params_to_update=[]"],
        ["student_params_to_update=[] must be a list of regular expressions"],
    ),
    "two teachers": (
        ["teacher_overrides.model_name=llama2-7b", "offline_data_dir=logits"],
        ["teacher_overrides and offline_data_dir exclude each other"],
    ),
    "features of a teacher that is not there": (
        ["offline_data_dir=logits", "distill_beta=1"],
        ["distill_beta=1.0 (command line) would do nothing: it needs a teacher that runs"],
    ),
    "divergence from a teacher that is not there": (
        ["use_gkd=true"],
        ["use_gkd=True (command line) would do nothing: it needs a teacher that runs"],
    ),
    "two losses of a teacher": (
        ["teacher_overrides.model_name=llama2-7b", "use_gkd=true", "distill_alpha=0.3"],
        ["distill_alpha=0.3", "the divergence is the only loss of GKD"],
    ),
    "sampling without prompts": (
        ["teacher_overrides.model_name=llama2-7b", "use_gkd=true", "packing=false"],
        ["sft_train_on_completion_only=true", "or gkd_lambda=0"],
    ),
    "sampling for packed rows": (
        [
            "teacher_overrides.model_name=llama2-7b",
            "use_gkd=true",
            "use_sft=true",
            "sft_train_on_completion_only=true",
        ],
        ["samples one completion for each row: set packing=false"],
    ),
    "length of completions that nobody samples": (
        [
            "teacher_overrides.model_name=llama2-7b",
            "use_gkd=true",
            "gkd_lambda=0",
            "gkd_max_new_tokens=5",
        ],
        ["gkd_max_new_tokens=5", "it needs use_gkd=true and gkd_lambda above 0"],
    ),
    "weights learned from a teacher that is not there": (
        ["learn_to_init_mode=true"],
        ["learn_to_init_mode=True (command line) would do nothing: it needs a teacher that runs"],
    ),
    "map of weights that are not learned": (
        ["teacher_overrides.model_name=llama2-7b", "lti_use_general_linear_map=true"],
        ["lti_use_general_linear_map=True", "it needs learn_to_init_mode=true"],
    ),
    "adapters of learned weights": (
        ["teacher_overrides.model_name=llama2-7b", "learn_to_init_mode=true", "lora_rank=4"],
        ["leave out lora_rank and lora_restore_path"],
    ),
    "distillation of preferences": (
        ["teacher_overrides.model_name=llama2-7b", "use_dpo=true", "packing=false"],
        ["use_dpo and teacher_overrides exclude each other"],
    ),
    "unknown key": (["learning_rat=1"], ["unknown key 'learning_rat'", "learning_rate"]),
    "unknown key without a neighbour": (["zzzzzz=1"], ["unknown key 'zzzzzz'"]),
    "part of a key": (["capacity=1"], ["unknown key 'capacity'", "capacity_factor"]),
    "no value": (["steps"], ["unknown argument 'steps': write steps=VALUE"]),
    "no equals sign in a later word": (
        ["run_name=a", "steps", "3"],
        ["unknown argument 'steps': write steps=VALUE"],
    ),
    "no key": (["=3"], ["expected key=value"]),
    "unknown option": (["--steps=3"], ["unknown option", "without dashes: write steps=VALUE"]),
    "unknown format": (["--format", "xml"], ["--format takes yaml or json"]),
    "format without a value": (["--format"], ["--format needs a value"]),
    "text for a whole number": (
        ["base_emb_dim=ten"],
        ["base_emb_dim='ten'", "command line", "a whole number"],
    ),
    "fraction for a whole number": (["base_emb_dim=1.5"], ["base_emb_dim=1.5", "a whole number"]),
    "true for a whole number": (["base_emb_dim=true"], ["base_emb_dim=True", "a whole number"]),
    "list for a whole number": (["base_emb_dim=[1]"], ["base_emb_dim=[1]", "a whole number"]),
    "none for a whole number": (["base_emb_dim=none"], ["base_emb_dim", "a whole number"]),
    "text for a number": (["per_device_batch_size=big"], ["per_device_batch_size='big'", "number"]),
    "true for a number": (["per_device_batch_size=true"], ["per_device_batch_size=True", "number"]),
    "nan": (["normalization_layer_epsilon=.nan"], ["normalization_layer_epsilon=nan", "a number"]),
    "infinity": (
        ["normalization_layer_epsilon=.inf"],
        ["normalization_layer_epsilon=inf", "a number"],
    ),
    "text for a bool": (
        ["override_model_config=maybe"],
        ["override_model_config='maybe'", "true or false"],
    ),
    "text for a list": (["mesh_axes=data"], ["mesh_axes='data'", "a list of text"]),
    "broken list": (["mesh_axes=[data"], ["mesh_axes=[data", "not a valid value"]),
    "unknown choice": (["decoder_block=lama2"], ["decoder_block='lama2'", "did you mean llama2"]),
    "unknown dtype": (["dtype=float12"], ["dtype='float12'", "one of bfloat16, float32, float16"]),
    "unknown remat policy": (
        ["remat_policy=half"],
        ["remat_policy='half' is not known", "minimal"],
    ),
    "unknown remat place": (
        ["remat_policy=custom", "context=disk"],
        ["context='disk'", "one of remat, device, offload"],
    ),
    "unknown attention": (["attention=fast"], ["attention='fast' is not known", "dot_product"]),
    "unknown model": (
        ["model_name=llama3.1-9b"],
        ["unknown model_name 'llama3.1-9b'", "did you mean llama3.1-8b"],
    ),
    "unknown model and no neighbour": (["model_name=zzz"], ["unknown model_name 'zzz'"]),
    "missing file": (["nowhere.yml"], ["no configuration file 'nowhere.yml'"]),
    "misspelt preset": (
        ["bas"],
        ["no configuration file, model or data 'bas'", "did you mean base"],
    ),
    "set twice": (["run_name=a", "run_name=b"], ["run_name is set twice", "'a' and 'b'"]),
    "negative below the bound": (["q_lora_rank=-1"], ["q_lora_rank=-1", ">= 0"]),
    "zero where positive": (["num_experts=0"], ["num_experts=0", "> 0"]),
    "zero accumulation": (
        ["gradient_accumulation_steps=0"],
        ["gradient_accumulation_steps=0", "> 0"],
    ),
    "zero width": (["base_emb_dim=0"], ["base_emb_dim=0 is out of range", "at least 1"]),
    "no layers": (["base_num_decoder_layers=0"], ["base_num_decoder_layers=0 is out of range"]),
    "negative batch": (["per_device_batch_size=-1"], ["per_device_batch_size=-1 is out of range"]),
    "fraction above one": (
        ["warmup_steps_fraction=1.5"],
        ["warmup_steps_fraction=1.5 is out of range", "between 0 and 1"],
    ),
    "dropout above one": (["dropout_rate=2"], ["dropout_rate=2.0 is out of range"]),
    "negative steps": (["steps=-5"], ["steps=-5 is out of range"]),
    "port too large": (
        ["prometheus_port=70000"],
        ["prometheus_port=70000 is out of range", "65535"],
    ),
    "empty batch": (["per_device_batch_size=0"], ["less than one sequence per step"]),
    "batch that is no whole number": (["per_device_batch_size=1.5"], ["makes 1.5 sequences"]),
    "not a power of two": (
        ["global_parameter_scale=3"],
        ["global_parameter_scale=3 is not a power of two"],
    ),
    "negative scale": (
        ["global_parameter_scale=-2"],
        ["global_parameter_scale=-2 is not a power of two"],
    ),
    "heads": (
        ["base_num_query_heads=6", "base_num_kv_heads=4"],
        ["base_num_query_heads=6 is not a multiple"],
    ),
    "two free ICI axes": (
        ["ici_fsdp_parallelism=-1", "ici_data_parallelism=-1"],
        ["ici_data_parallelism and ici_fsdp_parallelism are both -1"],
    ),
    "two free DCN axes": (
        ["dcn_fsdp_parallelism=-1"],
        ["dcn_data_parallelism and dcn_fsdp_parallelism are both -1"],
    ),
    "more devices than there are": (
        ["ici_tensor_parallelism=64"],
        ["ici_*_parallelism", "multiply to 64"],
    ),
    "fewer devices than there are": (
        ["ici_fsdp_parallelism=3"],
        ["ici_*_parallelism", "multiply to 3"],
    ),
    "zero axis": (["ici_tensor_parallelism=0"], ["ici_tensor_parallelism=0", "1 or more, or -1"]),
    "axis outside the mesh": (
        ["mesh_axes=[data]", "ici_tensor_parallelism=2"],
        ["mesh_axes has no axis 'tensor'"],
    ),
    "repeated mesh axis": (["mesh_axes=[data, data]"], ["mesh_axes names data more than once"]),
    "unknown mesh axis": (["mesh_axes=[data, fsdp, warp]"], ["mesh_axes", "'warp'"]),
    "axis rules of a wrong shape": (["logical_axis_rules=[mlp]"], ["must be a list of pairs"]),
    "axis rules that are no list": (["logical_axis_rules=3"], ["must be a list of pairs"]),
    "model file conflict": (
        ["model_name=llama2-7b", "base_emb_dim=64"],
        ["base_emb_dim=64", "differs from 4096", "override_model_config=true"],
    ),
    "two checkpoints": (
        ["load_parameters_path=/a", "load_full_state_path=/b"],
        ["load_parameters_path and load_full_state_path are both set"],
    ),
    "local checkpoints without a place": (
        ["enable_multi_tier_checkpointing=true"],
        ["local_checkpoint_directory"],
    ),
    "zarr3 without ocdbt": (
        ["checkpoint_storage_use_ocdbt=false"],
        ["needs checkpoint_storage_use_ocdbt=true"],
    ),
    "window without a size": (["attention_type=local_sliding"], ["needs sliding_window_size"]),
    "chunks without a size": (["attention_type=chunk"], ["needs chunk_attn_window_size"]),
    "unknown activation": (["mlp_activations=[sulu]"], ["unknown names sulu"]),
    "three activations": (["mlp_activations=[silu, linear, relu]"], ["one name, or two"]),
    "more experts chosen than there are": (["num_experts_per_tok=2"], ["more than num_experts=1"]),
    "groups that do not divide": (
        ["num_experts=6", "n_routing_groups=4", "topk_routing_group=2"],
        ["n_routing_groups=4 does not divide num_experts=6"],
    ),
    "bias update without a bias": (["routed_bias_update_rate=0.1"], ["set routed_bias=true"]),
    "indexer without MLA": (["use_indexer=true"], ["use_indexer=true needs attention_type=mla"]),
    "experts in a block without them": (
        ["num_experts=8"],
        ["num_experts=8", "would do nothing", "mixtral"],
    ),
    "experts in a model whose layers are all dense": (
        ["decoder_block=deepseek", "num_experts=8", "first_num_dense_layers=16"],
        ["num_experts=8", "it needs first_num_dense_layers below the number of layers, 16"],
    ),
    "key of experts in a model whose layers are all dense": (
        [
            "decoder_block=llama4",
            "chunk_attn_window_size=16",
            "num_experts=8",
            "interleave_moe_layer_step=17",
            "num_experts_per_tok=2",
        ],
        [
            "num_experts_per_tok=2",
            "it needs interleave_moe_layer_step up to the number of layers, 16",
        ],
    ),
    "key of experts without experts": (
        ["decoder_block=mixtral", "load_balance_loss_weight=0.1"],
        ["load_balance_loss_weight=0.1", "num_experts above 1"],
    ),
    "capacity of experts that drop nothing": (
        [*MOE, "capacity_factor=1.5"],
        ["set sparse_matmul=false"],
    ),
    "no capacity": ([*MOE, "capacity_factor=0"], ["capacity_factor=0 is out of range"]),
    "no buffer": (
        [*MOE, "ragged_buffer_factor=0"],
        ["ragged_buffer_factor=0 is out of range"],
    ),
    "buffer for everything": (
        [*MOE, "ragged_buffer_factor=2"],
        ["ragged_buffer_factor=2 would do nothing"],
    ),
    "buffer of dense experts": (
        [*MOE, "sparse_matmul=false", "ragged_buffer_factor=0.5"],
        ["ragged_buffer_factor=0.5", "it needs sparse_matmul=true"],
    ),
    "attention of a vLLM server": (
        ["attention=vllm_rpa"],
        ["attention=vllm_rpa is the attention of a vLLM server", "attention=paged"],
    ),
    "kernel of dense experts": (
        [*MOE, "sparse_matmul=false", "megablox=false"],
        ["megablox=False", "it needs sparse_matmul=true"],
    ),
    "sort of dense experts": (
        [*MOE, "sparse_matmul=false", "use_custom_sort_vjp=false"],
        ["use_custom_sort_vjp=False", "it needs sparse_matmul=true"],
    ),
    "fewer experts in the groups than chosen": (
        [
            "decoder_block=mixtral",
            "num_experts=8",
            "num_experts_per_tok=3",
            "n_routing_groups=4",
            "topk_routing_group=1",
        ],
        ["topk_routing_group=1 groups of 2 experts are fewer than num_experts_per_tok=3"],
    ),
    "score function of another family": (
        [*MOE, "routed_score_func=sigmoid"],
        ["it needs decoder_block=deepseek"],
    ),
    "bias of another family's router": (
        [*MOE, "routed_bias=true"],
        ["one of the decoder_blocks deepseek, glm4_moe, gpt_oss, minimax_m2"],
    ),
    "balancing of a bias that is learned": (
        [
            "decoder_block=gpt_oss",
            "num_experts=8",
            "sliding_window_size=4",
            "routed_bias=true",
            "routed_bias_update_rate=0.1",
        ],
        ["routed_bias_update_rate=0.1", "it needs one of the decoder_blocks deepseek, glm4_moe"],
    ),
    "dense layers of another family": (
        [*MOE, "first_num_dense_layers=1"],
        ["it needs decoder_block=deepseek"],
    ),
    "interleaved experts of another family": (
        [*MOE, "interleave_moe_layer_step=2"],
        ["it needs decoder_block=llama4"],
    ),
    "two shared MLPs in gemma4": (
        ["decoder_block=gemma4", "num_experts=8", "sliding_window_size=4", "shared_experts=2"],
        ["shared_experts=2", "gemma4, which has one shared MLP"],
    ),
    "sum that is in float32 anyway": (
        [
            "decoder_block=llama4",
            "num_experts=8",
            "chunk_attn_window_size=4",
            "float32_weight_sum=false",
        ],
        ["float32_weight_sum=False", "llama4, which weights the inputs of experts"],
    ),
    "two widths of experts": (
        [*MOE, "base_mlp_dim=64", "base_moe_mlp_dim=32"],
        ["base_mlp_dim=64", "all layers have experts", "base_moe_mlp_dim=32"],
    ),
    "biases of experts": (
        [*MOE, "mlp_bias=true"],
        ["mlp_bias=True", "a dense MLP"],
    ),
    "fused MLP of experts": (
        [*MOE, "fused_mlp=true"],
        ["fused_mlp=True", "a dense MLP"],
    ),
    "narrow experts of another family": (
        [*MOE, "moe_expert_input_dim=8"],
        ["it needs decoder_block=qwen3_custom_moe"],
    ),
    "narrow attention of another family": (
        ["attention_output_dim=8"],
        ["it needs decoder_block=qwen3_custom_moe"],
    ),
    "attention and experts of two widths": (
        [
            "decoder_block=qwen3_custom_moe",
            "num_experts=8",
            "attention_output_dim=8",
            "moe_expert_input_dim=4",
        ],
        ["moe_expert_input_dim=4", "must equal attention_output_dim=8"],
    ),
    "latent attention of another family": (
        ["attention_type=mla"],
        ["attention_type=mla needs decoder_block=deepseek"],
    ),
    "size of latents without latents": (
        ["kv_lora_rank=8"],
        ["kv_lora_rank=8", "it needs attention_type=mla"],
    ),
    "no latent": ([*LATENT, "kv_lora_rank=0"], ["kv_lora_rank=0 is out of range"]),
    "head size beside latent sizes": (
        [*LATENT, "head_dim=64"],
        ["head_dim=64", "qk_nope_head_dim"],
    ),
    "shared keys of latent attention": (
        [*LATENT, "base_num_kv_heads=8"],
        ["base_num_kv_heads=8", "own keys", "set it to 16"],
    ),
    "odd rotary part": ([*LATENT, "qk_rope_head_dim=7"], ["qk_rope_head_dim=7", "rotates pairs"]),
    "learned positions beside latent attention": (
        [*LATENT, "trainable_position_size=4096"],
        ["trainable_position_size does not go with attention_type=mla"],
    ),
    "sinks of latent attention": (
        [*LATENT, "attention_sink=true"],
        ["attention_sink=True", "attention other than MLA"],
    ),
    "norms of latent attention": (
        [*LATENT, "use_qk_norm=true"],
        ["use_qk_norm=True", "attention other than MLA"],
    ),
    "fused projections of latent attention": (
        [*LATENT, "fused_qkv=true"],
        ["fused_qkv=True", "other than MLA"],
    ),
    "clipping without latents": (
        ["use_qk_clip=true"],
        ["use_qk_clip=true needs attention_type=mla"],
    ),
    "threshold without clipping": (
        ["qk_clip_threshold=50"],
        ["qk_clip_threshold=50", "use_qk_clip=true"],
    ),
    "size of an indexer without one": (
        [*LATENT, "indexer_topk=8"],
        ["indexer_topk=8", "it needs use_indexer=true"],
    ),
    "indexer without a query latent": ([*LATENT, "use_indexer=true"], ["needs q_lora_rank > 0"]),
    "indexer that picks nothing": (
        [*INDEXED, "indexer_topk=0"],
        ["indexer_topk=0 is out of range"],
    ),
    "sparse training without a loss": (
        [*INDEXED, "indexer_sparse_training=true"],
        ["indexer_sparse_training=True", "indexer_loss_scaling_factor"],
    ),
    "indexer heads below the rotary part": (
        [*INDEXED, "indexer_head_dim=32"],
        ["indexer_head_dim=32 is below qk_rope_head_dim=64"],
    ),
    "attention type of a block with its own": (
        [
            "decoder_block=gemma2",
            "sliding_window_size=4",
            "attention_type=chunk",
            "chunk_attn_window_size=4",
        ],
        ["attention_type=chunk", "would do nothing"],
    ),
    "block with sliding layers and no window": (
        ["decoder_block=gemma3"],
        ["decoder_block=gemma3 needs sliding_window_size"],
    ),
    "block with chunks and no size": (
        ["decoder_block=llama4"],
        ["decoder_block=llama4 needs chunk_attn_window_size"],
    ),
    "MoBA over windows": (
        ["moba=true", "decoder_block=gemma2", "sliding_window_size=4"],
        ["moba=true needs causal attention", "full and sliding"],
    ),
    "MoBA over latents": (
        [*LATENT, "moba=true"],
        ["moba=true needs causal attention", "mla"],
    ),
    "size of MoBA without it": (["moba_topk=2"], ["moba_topk=2", "it needs moba=true"]),
    "Gated DeltaNets of another family": (
        ["gdn_chunk_size=32"],
        ["decoder_block=qwen3_next or qwen3_5"],
    ),
    "fused projections with a gate": (
        ["decoder_block=qwen3_next", "fused_qkv=true"],
        ["whose attention has a gate"],
    ),
    "fused projections without values": (
        [
            "decoder_block=gemma4",
            "sliding_window_size=4",
            "share_kv_projections=true",
            "fused_qkv=true",
        ],
        ["fused_qkv=true does not go with share_kv_projections=true"],
    ),
    "global heads of another family": (
        ["global_num_kv_heads=4"],
        ["it needs decoder_block=gemma4"],
    ),
    "global heads that do not divide": (
        ["decoder_block=gemma4", "sliding_window_size=4", "global_num_kv_heads=3"],
        ["not a multiple of global_num_kv_heads=3"],
    ),
    "odd global heads": (
        ["decoder_block=gemma4", "sliding_window_size=4", "global_head_dim=15"],
        ["global_head_dim=15 is odd"],
    ),
    "proportions of another family": (
        ["global_rope_proportion=0.5"],
        ["it needs decoder_block=gemma4"],
    ),
    "local base of another family": (
        ["local_rope_max_timescale=500"],
        ["it needs decoder_block=gemma3 or gemma4"],
    ),
    "rotary part of a block with proportions": (
        ["decoder_block=gemma4", "sliding_window_size=4", "partial_rotary_factor=0.5"],
        ["partial_rotary_factor=0.5", "other than gemma4"],
    ),
    "pairs of a block that has its own": (
        [
            "decoder_block=llama4",
            "chunk_attn_window_size=4",
            "rope_type=yarn",
            "rope_interleave=false",
        ],
        ["rope_interleave=False", "llama4, which always interleaves"],
    ),
    "stretch that is switched off": (
        ["model_name=llama4-17b-128e", "rope_factor=8"],
        ["rope_factor=8", "rope_use_scale=true"],
    ),
    "correction without latents": (
        ["rope_type=yarn", "mscale=0.5"],
        ["mscale=0.5", "attention_type=mla"],
    ),
    "layers without positions in a block that has none": (
        ["decoder_block=qwen3", "nope_layer_interval=4"],
        ["nope_layer_interval=4", "llama4"],
    ),
    "temperature of another family": (
        ["temperature_tuning=true"],
        ["decoder_block=llama4 and nope_layer_interval"],
    ),
    "norms that always have a scale": (
        [
            "decoder_block=gemma3",
            "sliding_window_size=4",
            "use_qk_norm=true",
            "qk_norm_with_scale=false",
        ],
        ["qk_norm_with_scale=False", "other than gemma3"],
    ),
    "norms behind a block without a place for them": (
        ["decoder_block=default", "use_post_attn_norm=true"],
        ["use_post_attn_norm=True", "in sequence"],
    ),
    "limit on one activation": (
        ["mlp_activations=[gelu]", "mlp_activations_limit=7"],
        ["mlp_activations_limit=7", "must have two names"],
    ),
    "limit of zero": (
        ["mlp_activations_limit=0"],
        ["mlp_activations_limit=0 is out of range", "above 0"],
    ),
    "dropout in a block without it": (
        ["decoder_block=simple", "dropout_rate=0.1"],
        ["dropout_rate=0.1", "a decoder_block with dropout"],
    ),
    "dropout of a model that switches it off": (
        ["model_name=mistral-7b", "dropout_rate=0.1"],
        ["dropout_rate=0.1", "enable_dropout=true"],
    ),
    "further tokens of a block that cannot": (
        ["decoder_block=simple", "mtp_num_layers=1"],
        ["mtp_num_layers=1 does not go with decoder_block=simple"],
    ),
    "weight of no further tokens": (["mtp_loss_scaling_factor=0.5"], ["it needs mtp_num_layers"]),
    "drafts that nobody evaluates": (
        ["mtp_num_layers=1", "mtp_eval_target_module=1"],
        ["mtp_eval_target_module=1", "it needs eval_interval"],
    ),
    "streams of a block with one line": (
        ["decoder_block=default", "mhc_expansion_rate=2"],
        ["mhc_expansion_rate=2 does not go with decoder_block=default"],
    ),
    "iterations without streams": (
        ["sinkhorn_iterations=5"],
        ["it needs mhc_expansion_rate above 1"],
    ),
    "memory of a block without a place for it": (
        ["decoder_block=qwen3_custom_moe", "num_experts=8", *MEMORY],
        ["engram_layers does not go with decoder_block=qwen3_custom_moe"],
    ),
    "size of no memory": (["engram_num_heads=2"], ["engram_num_heads=2", "it needs engram_layers"]),
    "memory in a layer twice": (
        ["engram_layers=[1, 1]", "engram_vocab_bases=[20, 20]"],
        ["engram_layers=[1, 1] names a layer more than once"],
    ),
    "memory in a layer that is not there": (
        ["engram_layers=[16]", "engram_vocab_bases=[20, 20]"],
        ["engram_layers [16] are outside 0..15"],
    ),
    "expert tensors without experts": (
        ["remat_policy=custom", "moe_mlpwo=device"],
        ["moe_mlpwo=device", "num_experts above 1"],
    ),
    "latent tensors without latents": (
        ["remat_policy=custom", "mla_q=device"],
        ["mla_q=device", "attention_type=mla"],
    ),
    "query latent that is not there": (
        [*LATENT, "remat_policy=custom", "query_wa_proj=device"],
        ["query_wa_proj=device", "q_lora_rank"],
    ),
    "memory's tensor without a memory": (
        ["remat_policy=custom", "engram=device"],
        ["engram=device", "remat_policy=custom and engram_layers"],
    ),
    "joint tensor of separate projections": (
        ["remat_policy=custom", "qkv_proj=device"],
        ["qkv_proj=device", "it needs fused_qkv=true"],
    ),
    "separate tensors of joint projections": (
        ["remat_policy=custom", "fused_qkv=true", "key_proj=device"],
        ["key_proj=device", "it needs fused_qkv=false"],
    ),
    "joint tensor of separate branches": (
        ["remat_policy=custom", "mlpwi=device"],
        ["mlpwi=device", "fused_mlp=true"],
    ),
    "separate tensors of joint branches": (
        ["remat_policy=custom", "fused_mlp=true", "mlpwi_0=device"],
        ["mlpwi_0=device", "fused_mlp=false"],
    ),
    "ramp-up that misses the target": (
        ["enable_rampup_batch_size=true", "per_device_batch_size_increment=5"],
        ["does not end at per_device_batch_size=12"],
    ),
    "schedule phases overlap": (
        ["lr_schedule_type=wsd", "warmup_steps_fraction=0.6", "wsd_decay_steps_fraction=0.6"],
        ["warmup_steps_fraction + wsd_decay_steps_fraction is above 1"],
    ),
    "bad regular expression": (["adamw_mask=['(']"], ["adamw_mask", "not a regular expression"]),
    "nucleus without p": (
        ["decode_sampling_strategy=nucleus"],
        ["needs decode_sampling_nucleus_p"],
    ),
    "two fine-tuning methods": (
        ["use_dpo=true", "use_sft=true"],
        ["use_dpo and use_sft exclude each other"],
    ),
    "packed pairs": (["use_dpo=true"], ["set packing=false with use_dpo"]),
    "packed pairs of a reward model": (
        ["num_labels=1", "packing=true"],
        ["set packing=false with num_labels"],
    ),
    "reward model and SFT": (
        ["num_labels=1", "use_sft=true"],
        ["use_sft and num_labels exclude each other"],
    ),
    "classifier": (["num_labels=3"], ["num_labels=3 is a classifier", "only reward models"]),
    "reward model of a teacher": (
        ["num_labels=1", "teacher_overrides.model_name=llama2-7b"],
        ["num_labels=1 is a reward model, which has no logits to distill"],
    ),
    "rewards of no reward model": (
        ["center_rewards_coefficient=0.1"],
        ["center_rewards_coefficient=0.1", "it needs num_labels=1"],
    ),
    "reward model without reinforcement learning": (
        ["reward_model_path=x"],
        ["reward_model_path=x", "it needs use_grpo"],
    ),
    "packing of rows that are not packed": (
        ["packing=false", "grain_packing_type=best_fit"],
        ["grain_packing_type=best_fit", "it needs packing=true"],
    ),
    "split conversations": (
        ["use_sft=true", "grain_packing_type=concat_then_split"],
        ["concat_then_split splits conversations", "use first_fit or best_fit"],
    ),
    "conversations in pieces": (
        ["use_sft=true", "use_truncation=false"],
        ["use_truncation=false splits documents, but use_sft keeps rows whole"],
    ),
    "rows of token ids": (
        ["use_sft=true", "tokenize_train_data=false"],
        ["use_sft tokenizes conversations", "leave tokenize_train_data=true"],
    ),
    "rows without records": (
        ["use_dpo=true", "packing=false", "dataset_type=olmo_grain"],
        ["dataset_type=olmo_grain has no conversations or pairs for use_dpo"],
    ),
    "prompt without a completion": (
        ["use_dpo=true", "packing=false", "max_prompt_length=65", "max_target_length=64"],
        ["max_prompt_length=65 leaves no token of max_target_length=64 for a completion"],
    ),
    "smoothing that a loss does not have": (
        ["use_dpo=true", "packing=false", "dpo_loss_type=apo_zero", "dpo_label_smoothing=0.1"],
        ["dpo_label_smoothing=0.1", "it needs dpo_loss_type=sigmoid, robust, simpo, orpo"],
    ),
    "most labels are flipped": (
        ["use_dpo=true", "packing=false", "dpo_loss_type=robust", "dpo_label_smoothing=0.5"],
        ["dpo_label_smoothing=0.5 is the part of labels that are flipped", "below 0.5"],
    ),
    "KL of microbatches": (
        ["use_dpo=true", "packing=false", "dpo_loss_type=kto", "gradient_accumulation_steps=2"],
        ["dpo_loss_type=kto estimates a KL", "gradient_accumulation_steps=2 computes only a part"],
    ),
    "beta of odds": (
        ["use_dpo=true", "packing=false", "dpo_loss_type=orpo", "dpo_beta=0.2"],
        ["dpo_beta=0.2", "other than orpo, whose weight is orpo_lambda"],
    ),
    "reference of a loss without one": (
        ["use_dpo=true", "packing=false", "dpo_loss_type=simpo", "precompute_reference_logps=true"],
        ["precompute_reference_logps=True", "orpo and simpo have none"],
    ),
    "losses of next tokens over pairs": (
        ["use_dpo=true", "packing=false", "z_loss_multiplier=0.1", "mtp_num_layers=1"],
        ["z_loss_multiplier=0.1", "mtp_num_layers=1", "losses of use_dpo compare completions"],
    ),
    "further tokens of a teacher": (
        ["offline_data_dir=logits", "mtp_num_layers=1"],
        ["mtp_num_layers=1", "distillation has no loss of the MTP layers"],
    ),
    "rank that is not low": (
        ["base_emb_dim=64", "lora_rank=65"],
        ["lora_rank=65 is above emb_dim=64, the rank of a full update"],
    ),
    "update of frozen weights": (
        ["lora_rank=2", "use_qk_clip=true"],
        ["use_qk_clip=True", "adapters leave them frozen"],
    ),
    "mask without rows": (
        ["sft_train_on_completion_only=true"],
        ["sft_train_on_completion_only=True", "it needs use_sft=true"],
    ),
    "arguments without a function": (
        ["use_sft=true", "formatting_func_kwargs={a: 1}"],
        ["formatting_func_kwargs", "it needs formatting_func_path"],
    ),
    "sparsity half set": (
        ["weight_sparsity_n=2"],
        ["weight_sparsity_n and weight_sparsity_m go together"],
    ),
    "computed key": (
        ["emb_dim=4"],
        ["emb_dim=4", "cannot be set, it is computed and comes to 2048"],
    ),
    "key that does not act": (
        ["gcs_metrics=true"],
        ["gcs_metrics=True", "would be ignored", "Google Cloud"],
    ),
    "explain nothing": (["explain"], ["name a key"]),
    "explain an unknown key": (["explain", "remat"], ["unknown key 'remat'", "remat_policy"]),
    "status of something": (["status", "steps"], ["unknown argument 'steps'"]),
}


@pytest.mark.parametrize("name", CASES)
def test_mistake_is_reported(name, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    args, expected = CASES[name]
    refused(["config", *args], expected, capsys)


def refused(args, expected, capsys):
    assert main(args) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert "Traceback" not in output.err
    assert all(line.startswith("maxtext: error: ") for line in output.err.splitlines())
    for part in expected:
        assert part in output.err


def test_there_are_at_least_sixty_cases():
    assert len(CASES) >= 60


FILES = {
    "not YAML": ("steps: 1\n  bad: 2\n", ["mine.yml line 2", "not valid YAML"]),
    "a list": ("- 1\n- 2\n", ["mine.yml", "expected `key: value` lines"]),
    "set twice in a file": ("steps: 1\nsteps: 2\n", ["steps is set twice", "mine.yml:1", "line 2"]),
    "unknown key in a file": (
        "base_config: base.yml\nstepz: 3\n",
        ["unknown key 'stepz' (mine.yml:2)", "steps"],
    ),
    "wrong type in a file": ("\n\nbase_emb_dim: wide\n", ["base_emb_dim='wide' (mine.yml:3)"]),
    "missing parent": ("base_config: parent.yml\n", ["no configuration file 'parent.yml'"]),
    "its own parent": ("base_config: mine.yml\n", ["base_config forms a circle"]),
    "conflict with the model": (
        "base_config: base.yml\nmodel_name: llama2-7b\nbase_emb_dim: 64\n",
        ["base_emb_dim=64 (mine.yml:3)", "models/llama2-7b.yml"],
    ),
    "not text": (b"\xff\xfe\x00", ["cannot read the configuration file"]),
    "a tag that runs code": (
        "steps: !!python/object/apply:os.getcwd []\n",
        ["not valid YAML", "could not determine"],
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_mistake_in_a_file(name, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    content, expected = FILES[name]
    (tmp_path / "mine.yml").write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(["config", "mine.yml"], expected, capsys)


def test_environment_conflicts_with_the_command_line(capsys, monkeypatch):
    monkeypatch.setenv("M_STEPS", "3")
    refused(
        ["config", "steps=3"],
        ["steps is set by the environment (M_STEPS) and by the command line"],
        capsys,
    )


def test_unknown_and_wrong_environment_variables(capsys, monkeypatch):
    monkeypatch.setenv("M_STEPZ", "3")
    refused(["config"], ["unknown key 'stepz' (environment (M_STEPZ))", "steps"], capsys)
    monkeypatch.delenv("M_STEPZ")
    monkeypatch.setenv("M_BASE_EMB_DIM", "wide")
    refused(["config"], ["base_emb_dim='wide' (environment (M_BASE_EMB_DIM))"], capsys)


def test_all_mistakes_are_reported_at_once(capsys):
    refused(
        ["config", "base_emb_dim=x", "base_mlp_dim=y"],
        ["base_emb_dim='x'", "base_mlp_dim='y'"],
        capsys,
    )


def test_unknown_command(capsys):
    refused(["trian"], ["unknown command 'trian'; did you mean train?"], capsys)
    refused(["zzz"], ["the commands are"], capsys)


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("serve m --prot 8000", "unknown option '--prot'; did you mean --port"),
        ("data inspct", "unknown task 'inspct' of maxtext data; did you mean inspect?"),
        ("config explian dtype", "unknown task 'explian' of maxtext config; did you mean explain?"),
        ("data inspect --batch=2", "unknown option '--batch=2'; did you mean --batches?"),
        ("data throughput --rows 2", "--rows would do nothing in maxtext data throughput"),
        ("sft --learning-rate 1", "without dashes: write learning_rate=VALUE"),
        ("sft --forse", "unknown option '--forse'; did you mean --force?"),
        ("estimate --target cpu --target gpu", "--target is given twice"),
        ("sft --force=yes", "--force takes no value"),
        ("serve m --adapter gs://a/b", "only local paths are supported"),
    ],
)
def test_misspelt_options_and_tasks(line, hint, capsys):
    refused(line.split(), [hint], capsys)


def test_debug_shows_the_traceback():
    with pytest.raises(Exception, match="unknown key"):
        main(["config", "stepz=1", "--debug"])
