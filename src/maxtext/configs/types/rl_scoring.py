"""Reinforcement learning: evaluation, rewards and the format of responses."""

from typing import Literal

from maxtext.common.types import Json
from maxtext.configs.types.key import RL_EVALUATION, Group, key


class RLEvaluation(Group):
    """How completions are sampled and counted in RL evaluation."""

    eval_sampling_strategy: str = key(
        "greedy",
        "How responses are sampled in evaluation: greedy, standard, liberal or a name in "
        "generation_configs",
        needs=RL_EVALUATION,
    )
    generation_configs: Json = key(
        dict,
        "Named ways to sample: each name maps to eval_temperature, eval_top_k and eval_top_p",
        needs=RL_EVALUATION,
    )
    num_eval_passes: int = key(
        1,
        "Responses to each problem of the evaluation; eval_mode combines them",
        low=1,
        needs=RL_EVALUATION,
    )
    eval_corr_lst: bool = key(
        False,
        "Write the problems with correct answers to evaluation.jsonl; false = the problems with "
        "incorrect answers",
        needs="eval_make_lst",
    )
    eval_make_lst: bool = key(
        False,
        "Write problems with their answers and responses to evaluation.jsonl; see eval_corr_lst",
        needs=RL_EVALUATION,
    )
    eval_mode: Literal["pass", "maj", "pass_at_1"] = key(
        "pass",
        "How the responses to a problem count: pass (any is right), maj (the most frequent "
        "answer), pass_at_1 (the share that is right)",
        needs=RL_EVALUATION,
    )


class Reward(Group):
    """Points and penalties that score a completion's format and answer."""

    reward_exact_answer: float = key(
        5.0, "Points when the extracted answer equals the reference exactly", needs="use_grpo"
    )
    reward_exact_format_match: float = key(
        3.0,
        "Points when the whole completion follows the reasoning and answer template",
        needs="use_grpo",
    )
    reward_white_space_format_match: float = key(
        1.5,
        "Points when the answer equals the reference once spaces around it are ignored",
        needs="use_grpo",
    )
    reward_partial_format_match: float = key(
        0.5,
        "Points for each special token that occurs exactly once, if the full template is not met",
        needs="use_grpo",
    )
    reward_ratio_guess_to_answer_high: float = key(
        0.5, "Points when a numeric answer is within 10 percent of the reference", needs="use_grpo"
    )
    reward_ratio_guess_to_answer_low: float = key(
        0.25,
        "Points when a numeric answer is within 20 percent of the reference, but not 10",
        needs="use_grpo",
    )
    penalty_incorrect_format: float = key(
        -0.5,
        "Points, negative, for a missing or repeated special token or an unreadable answer",
        needs="use_grpo",
    )
    penalty_incorrect_answer: float = key(
        -1.0,
        "Points, negative, for an answer that is wrong beyond the 20 percent band",
        needs="use_grpo",
    )
    math_verify_timeout: int = key(
        300,
        "Seconds that comparing the mathematical answers of a batch may take",
        low=1,
        needs="use_grpo",
    )
    math_verify_num_procs: int | None = key(
        None,
        "Processes that compare mathematical answers; null: one for each core, at most 8",
        low=1,
        needs="use_grpo",
    )


class SpecialTokens(Group):
    """Texts that delimit reasoning and answer in a completion."""

    reasoning_start_token: str = key(
        "<reasoning>", "Text that opens the reasoning part of a completion", needs="use_grpo"
    )
    reasoning_end_token: str = key(
        "</reasoning>", "Text that closes the reasoning part of a completion", needs="use_grpo"
    )
    solution_start_token: str = key(
        "<answer>", "Text that opens the final answer, which the rewards read", needs="use_grpo"
    )
    solution_end_token: str = key(
        "</answer>", "Text that closes the final answer, which the rewards read", needs="use_grpo"
    )
