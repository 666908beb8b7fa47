"""Reinforcement learning: hardware split, rollouts, rewards."""

from typing import Literal

from maxtext.common.types import Json
from maxtext.configs.types import inert
from maxtext.configs.types.key import (
    KL,
    REWARD_FUNCTIONS,
    RL_EVALUATION,
    SAMPLER_CORRECTION,
    Group,
    key,
)


class RLHardware(Group):
    """How devices are divided between policy training and rollout generation."""

    trainer_devices_fraction: float = key(
        0.5,
        "Share of the hosts, 0 to 1, that train in reinforcement learning: the first ones",
        low=0,
        high=1,
        needs="use_grpo",
    )
    sampler_devices_fraction: float = key(
        0.5,
        "Share of the hosts, 0 to 1, that sample: the last ones; both 1 = all devices do both in "
        "turn",
        low=0,
        high=1,
        needs="use_grpo",
    )
    chips_per_vm: int = key(
        4,
        "Devices of a host; trainer and sampler divide the devices by whole hosts, and share the "
        "devices of a single host",
        low=1,
        needs="use_grpo",
    )
    use_pathways: bool = key(
        True,
        "Run RL on Google Pathways, with one controller process for all hosts",
        status=inert.PATHWAYS,
        accepts=False,
    )
    num_trainer_slices: int = key(
        -1,
        "Whole slices of the trainer, set together with num_samplers_slices; -1 = "
        "trainer_devices_fraction",
        low=1,
        special=(-1,),
        needs="use_grpo",
    )
    num_samplers_slices: int = key(
        -1,
        "Whole slices of the sampler, set together with num_trainer_slices; -1 = "
        "sampler_devices_fraction",
        low=1,
        special=(-1,),
        needs="use_grpo",
    )
    rollout_data_parallelism: int = key(
        -1,
        "Copies of the model that sample in parallel; -1 = sampler devices / (tensor x expert)",
        low=1,
        special=(-1,),
        needs="use_grpo",
    )
    rollout_tensor_parallelism: int = key(
        -1,
        "Devices over which a copy of the sampler's weights is split; -1 = 1, or devices / "
        "(data x expert)",
        low=1,
        special=(-1,),
        needs="use_grpo",
    )
    rollout_expert_parallelism: int = key(
        1,
        "Devices over which the sampler's MoE experts are spread; 1 = no expert split",
        low=1,
        needs="use_grpo",
    )


class VLLM(Group):
    """Memory and scheduling of the engine that samples rollouts; MaxText's names for vLLM."""

    kv_cache_buffer: int = key(
        256,
        "Tokens of KV cache that a rollout gets beyond max_target_length",
        low=0,
        needs="use_grpo",
    )
    hbm_utilization_vllm: float = key(
        0.72,
        "Share of device memory, 0 to 1, that the weights and caches of rollouts may take",
        low=0,
        high=1,
        needs="use_grpo",
    )
    swap_space_vllm_gb: int = key(
        2,
        "Host memory in GiB per device where vLLM can store the KV cache of paused requests",
        status=inert.NOT_VLLM,
    )
    enable_dp_attention: bool = key(
        False,
        "In vLLM, run attention data parallel while the MLP or experts stay tensor parallel",
        status=inert.VLLM_PARALLELISM,
    )
    enable_expert_parallel: bool = key(
        False,
        "In vLLM, place whole MoE experts on devices instead of slicing each one",
        status=inert.VLLM_PARALLELISM,
    )
    async_scheduling: bool = key(
        False,
        "Let vLLM schedule its next step while the devices run the current one",
        status=inert.NOT_VLLM,
        accepts=True,
    )
    max_num_batched_tokens: int | None = key(
        None,
        "Maximum number of prompt tokens that the engine prefills in one step; longer prompts are "
        "split; null = 4096",
        low=1,
        needs="use_grpo",
    )
    max_num_seqs: int | None = key(
        None,
        "Maximum number of rollouts that the engine works on at once; null = as many as fit",
        low=1,
        needs="use_grpo",
    )
    stop_strings: list[str] | None = key(
        None,
        "Strings that end a rollout when one of them is generated; null = only the "
        "end-of-sequence token",
        needs="use_grpo",
    )
    vllm_additional_config: Json = key(
        dict,
        "Extra settings passed to vLLM as they are, as a mapping; empty = none",
        status=inert.NOT_VLLM,
    )
    vllm_hf_overrides: Json = key(
        dict,
        "Values that replace entries of the Hugging Face config vLLM reads, as a mapping",
        status=inert.NOT_VLLM,
    )
    vllm_hf_config_path: str = key(
        "",
        "Folder or hub name of the Hugging Face config for vLLM; empty = that of tokenizer_path",
        status=inert.NOT_VLLM,
    )
    use_standalone_converter: bool = key(
        False,
        "Convert trainer weights for vLLM with the built-in per-family converter, not with "
        "Tunix's mapping",
        status=inert.NOT_VLLM,
    )
    vllm_load_format: str = key(
        "dummy",
        "Weights vLLM starts with: dummy (random; the trainer sends the real ones), auto, "
        "safetensors",
        status=inert.NOT_VLLM,
    )
    debug_converter: bool = key(
        False,
        "Compare and print weights while they are converted for vLLM; slow, for debugging",
        status=inert.NOT_VLLM,
    )
    gcs_debug_path: str = key(
        "",
        "Google Cloud Storage folder for what debug_converter dumps; empty = no dump",
        status=inert.GOOGLE_CLOUD,
    )


class RL(Group):
    """The policy-gradient algorithm: group sampling, clipping, KL penalty and rollouts."""

    num_generations: int = key(
        2,
        "Completions sampled for each prompt; GRPO scores each against its group, so at least 2",
        low=1,
        needs="use_grpo",
    )
    num_iterations: int = key(
        1,
        "Policy updates made from each batch of rollouts before new ones are sampled",
        low=1,
        needs="use_grpo",
    )
    grpo_beta: float = key(
        0.08,
        "Weight of the KL penalty that ties the policy to the reference model; 0 = no penalty",
        low=0,
        needs="use_grpo",
    )
    grpo_epsilon: float = key(
        0.2,
        "Clips the policy ratio to 1 +- epsilon; epsilon_high can set another upper side",
        low=0,
        needs="use_grpo",
    )
    loss_algo: Literal["grpo", "gspo-token"] = key(
        "grpo",
        "Importance ratio in the loss: grpo (per token) or gspo-token (sequence mean, applied"
        " per token)",
        needs="use_grpo",
    )
    use_agentic_rollout: bool = key(
        False,
        "Sample conversations of several turns, in which the model may call tools and an "
        "environment answers",
        needs="use_grpo",
    )
    max_concurrency: int = key(
        256,
        "Maximum number of conversations that are open at once when use_agentic_rollout=true",
        low=1,
        needs="use_agentic_rollout",
    )
    off_policy_steps: int = key(
        0,
        "Updates that the weights of a rollout may be behind the policy; rollouts are sampled "
        "while the policy is updated; 0 = on policy",
        low=0,
        needs="use_agentic_rollout",
    )
    system_prompt: str = key(
        "",
        "System message that begins each conversation with use_agentic_rollout=true; empty = none",
        needs="use_agentic_rollout",
    )
    degenerate_group_masking: bool = key(
        True,
        "Leave groups whose rewards are all equal, and whose advantages are 0, out of the loss",
        needs="use_grpo",
    )
    epsilon_high: float | None = key(
        None,
        "Upper clip of the policy ratio at 1 + this value; null = the same as grpo_epsilon",
        low=0,
        needs="use_grpo",
    )
    reshard_chunk_size: int | None = key(
        None,
        "Tensors that are copied at a time from the trainer to a sampler on other devices; "
        "null = all",
        low=1,
    )


class PolicyOptimization(Group):
    """Reinforcement learning beyond the published keys: loss, sampler and reward functions."""

    loss_agg_mode: Literal[
        "sequence-mean-token-mean",
        "token-mean",
        "micro-batch-token-mean",
        "sequence-mean-token-scale",
        "sequence-mean",
    ] = key(
        "sequence-mean-token-mean",
        "How the losses of tokens are added up: sequence-mean-token-mean, mean over the "
        "tokens of each completion, then over completions (GRPO); token-mean, over all tokens"
        " (DAPO); micro-batch-token-mean, over those of each microbatch (BNPO); "
        "sequence-mean-token-scale, sums over the longest completion's length (Dr. GRPO); "
        "sequence-mean, sums",
        needs="use_grpo",
    )
    scale_rewards: Literal["group", "batch", "none", "leave_one_out"] = key(
        "group",
        "Divisor of rewards less their group's mean: the deviation of the group or batch, or "
        "none; leave_one_out: rewards less the mean of the others in the group (RLOO)",
        needs="use_grpo",
    )
    kl_estimator: Literal["k1", "k2", "k3"] = key(
        "k3",
        "Estimator of the KL to the reference, with d = log p_ref - log p: k1 is -d, k2 is d^2 / "
        "2, k3 is e^d - d - 1",
        needs=("use_grpo", KL),
    )
    kl_correction: bool = key(
        False, "Multiply the KL estimate by the importance ratio", needs=("use_grpo", KL)
    )
    dual_clip: float | None = key(
        None,
        "Upper bound of the ratio for completions with a negative advantage; null = none",
        needs="use_grpo",
    )
    sampler_correction: Literal[
        "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
    ] = key(
        "none",
        "Weight the loss by p_trainer / p_sampler, of each token or of the sequence, and truncate "
        "weights above the cap or mask their tokens: none, token_truncate, token_mask, "
        "sequence_truncate, sequence_mask",
        needs="use_grpo",
    )
    sampler_correction_cap: float = key(
        2.0,
        "Largest weight of sampler_correction",
        low=1,
        needs=("use_grpo", SAMPLER_CORRECTION),
    )
    sampler_trainer_tolerance: float | None = key(
        None,
        "Largest difference between a log-probability of the sampler and the trainer; null = "
        "0.002 in float32, 0.5 in 16 bits",
        low=0,
        needs="use_grpo",
    )
    mask_truncated: bool = key(
        False,
        "Leave completions that ended at the length limit, or at max_turns, out of the loss",
        needs="use_grpo",
    )
    reasoning_start_token_in_prompt: bool = key(
        False,
        "Prompts end with reasoning_start_token, as some chat templates write it: completions"
        " are scored as if they began with it",
        needs="use_grpo",
    )
    reward_functions_path: str = key(
        "",
        "Module or file.py with the functions of reward_functions; empty = the built-in rewards",
        needs="use_grpo",
    )
    reward_functions: list[str] = key(
        list,
        "Names of functions in reward_functions_path, whose rewards are summed",
        needs=("use_grpo", REWARD_FUNCTIONS),
    )
    reward_weights: list[float] | None = key(
        None, "Factors of the reward functions, in their order; null = 1 each", needs="use_grpo"
    )
    reward_model_path: str = key(
        "",
        "Folder of a reward model (maxtext reward), whose score of a prompt with its completion "
        "is a reward",
        is_path=True,
        needs="use_grpo",
    )
    max_turns: int = key(
        8,
        "Maximum number of turns of the model in a conversation with use_agentic_rollout=true",
        low=1,
        needs=("use_grpo", "use_agentic_rollout"),
    )
    eval_batch_size: int = key(
        -1,
        "Problems of the evaluation that are sampled at a time; -1 = all",
        low=1,
        special=(-1,),
        needs=("use_grpo", RL_EVALUATION),
    )
    dataset_processor_path: str = key(
        "",
        "Python file with process_data(dataset_name, model_tokenizer, template_config, "
        "tmvp_config, x), which turns a record into a row with the column prompts; empty = "
        "rows are read by their columns",
        is_path=True,
        needs="use_grpo",
    )
    data_template_path: str = key(
        "",
        "JSON file with TEMPLATE and SYSTEM_PROMPT, the text around a question in use_grpo; "
        "empty: chat_template_path, if it is such a file",
        is_path=True,
        needs="use_grpo",
    )


class RLDataset(Group):
    """How many prompts reinforcement learning trains and tests on."""

    batch_size: int = key(
        1, "Prompts per RL step; each gets num_generations completions", low=1, needs="use_grpo"
    )
    num_batches: int = key(
        4, "Batches of prompts to train on, if steps is not set", low=1, needs="use_grpo"
    )
    num_test_batches: int = key(
        5,
        "Batches of batch_size rows of the evaluation data that are evaluated; 0 = none, -1 ="
        " all rows",
        low=0,
        special=(-1,),
        needs="use_grpo",
    )
    test_batch_start_index: int = key(
        0, "Row of the evaluation data where evaluation begins", low=0, needs=RL_EVALUATION
    )
    train_fraction: float = key(
        1.0,
        "Share of num_batches, 0 to 1, that is used, if steps is not set",
        low=0,
        high=1,
        needs="use_grpo",
    )
    train_micro_batch_size: int = key(
        -1,
        "Prompts per forward and backward pass, gradients accumulated; -1 = the whole batch_size",
        low=1,
        special=(-1,),
        needs="use_grpo",
    )
    rollout_micro_batch_size: int = key(
        -1,
        "Prompts sent to the sampler at a time; -1 = the whole batch_size",
        low=1,
        special=(-1,),
        needs="use_grpo",
    )
