"""Reinforcement learning: hardware split, rollouts, rewards."""

from typing import Any, Literal

from pydantic import Field

from maxtext.configs.types.group import Group


class RLHardware(Group):
    """How devices are divided between policy training and rollout generation."""

    trainer_devices_fraction: float = 0.5
    sampler_devices_fraction: float = 0.5
    chips_per_vm: int = 4
    use_pathways: bool = True
    num_trainer_slices: int = -1
    num_samplers_slices: int = -1
    rollout_data_parallelism: int = -1
    rollout_tensor_parallelism: int = -1
    rollout_expert_parallelism: int = 1


class VLLM(Group):
    """Memory, scheduling and weight loading of the vLLM rollout engine."""

    kv_cache_buffer: int = 256
    hbm_utilization_vllm: float = 0.72
    swap_space_vllm_gb: int = 2
    enable_dp_attention: bool = False
    enable_expert_parallel: bool = False
    async_scheduling: bool = False
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    stop_strings: list[str] | None = None
    vllm_additional_config: dict[str, Any] = Field(default_factory=dict)
    vllm_hf_overrides: dict[str, Any] = Field(default_factory=dict)
    vllm_hf_config_path: str = ""
    use_standalone_converter: bool = False
    vllm_load_format: str = "dummy"
    debug_converter: bool = False
    gcs_debug_path: str = ""


class RL(Group):
    """The policy-gradient algorithm: group sampling, clipping, KL penalty and rollouts."""

    num_generations: int = 2
    num_iterations: int = 1
    grpo_beta: float = 0.08
    grpo_epsilon: float = 0.2
    loss_algo: Literal["grpo", "gspo-token"] = "grpo"
    use_agentic_rollout: bool = False
    max_concurrency: int = 256
    off_policy_steps: int = 0
    system_prompt: str = ""
    degenerate_group_masking: bool = True
    epsilon_high: float | None = None
    reshard_chunk_size: int | None = None


class PolicyOptimization(Group):
    """Reinforcement learning beyond the published keys: loss, sampler and reward functions."""

    loss_agg_mode: Literal[
        "sequence-mean-token-mean",
        "token-mean",
        "micro-batch-token-mean",
        "sequence-mean-token-scale",
        "sequence-mean",
    ] = "sequence-mean-token-mean"
    scale_rewards: Literal["group", "batch", "none", "leave_one_out"] = "group"
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    kl_correction: bool = False
    dual_clip: float | None = None
    sampler_correction: Literal[
        "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
    ] = "none"
    sampler_correction_cap: float = 2.0
    sampler_trainer_tolerance: float | None = None
    mask_truncated: bool = False
    reasoning_start_token_in_prompt: bool = False
    reward_functions_path: str = ""
    reward_functions: list[str] = Field(default_factory=list)
    reward_weights: list[float] | None = None
    max_turns: int = 8
    eval_batch_size: int = -1
    dataset_processor_path: str = ""
    data_template_path: str = ""


class RLDataset(Group):
    """How many prompts reinforcement learning trains and tests on."""

    batch_size: int = 1
    num_batches: int = 4
    num_test_batches: int = 5
    test_batch_start_index: int = 0
    train_fraction: float = 1.0
    train_micro_batch_size: int = -1
    rollout_micro_batch_size: int = -1


class RLEvaluation(Group):
    """How completions are sampled and counted in RL evaluation."""

    eval_sampling_strategy: str = "greedy"
    generation_configs: dict[str, Any] = Field(default_factory=dict)
    num_eval_passes: int = 1
    eval_corr_lst: bool = False
    eval_make_lst: bool = False
    eval_mode: Literal["pass", "maj", "pass_at_1"] = "pass"


class Reward(Group):
    """Points and penalties that score a completion's format and answer."""

    reward_exact_answer: float = 5.0
    reward_exact_format_match: float = 3.0
    reward_white_space_format_match: float = 1.5
    reward_partial_format_match: float = 0.5
    reward_ratio_guess_to_answer_high: float = 0.5
    reward_ratio_guess_to_answer_low: float = 0.25
    penalty_incorrect_format: float = -0.5
    penalty_incorrect_answer: float = -1.0
    math_verify_timeout: int = 300
    math_verify_num_procs: int | None = None


class SpecialTokens(Group):
    """Texts that delimit reasoning and answer in a completion."""

    reasoning_start_token: str = "<reasoning>"
    reasoning_end_token: str = "</reasoning>"
    solution_start_token: str = "<answer>"
    solution_end_token: str = "</answer>"
