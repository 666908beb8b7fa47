"""`maxtext evaluate`: responses that a model samples, and how many of them are correct."""

import json
from pathlib import Path

from maxtext.cli import positionals
from maxtext.cli.arguments import Arguments
from maxtext.cli.generation import load_session, note, resolve_named_model
from maxtext.common.errors import ConfigError
from maxtext.configs import sources
from maxtext.configs.derive import run_folder

PRESET = str(sources.HERE / "evaluate.yml")


def run(arguments: Arguments) -> int:
    file, overrides = positionals.split(arguments.all_args, data="eval")
    if file is not None:
        overrides += sources.METHOD_KEYS["grpo"]
    file = file or PRESET
    model = resolve_named_model("maxtext evaluate MODEL DATA", file, overrides)
    config = model.config
    if config.num_test_batches == 0:
        raise ConfigError("num_test_batches=0 leaves nothing to evaluate: raise it, or set -1")
    from maxtext.trainers.methods.rl.response_evaluation import (
        evaluate_llm_responses,
        require_problems,
        write_responses,
    )
    from maxtext.trainers.methods.rl.rewards.functions import build_rewards

    problems = require_problems(config)  # an error comes before the weights are loaded
    session = load_session(model)
    evaluation = evaluate_llm_responses(config, session.llm, problems, build_rewards(config))
    if config.eval_make_lst:
        note(f"wrote {write_responses(config, evaluation, Path(run_folder(config)))}")
    metrics = evaluation.metrics
    if arguments["--json"]:
        print(json.dumps({"problems": len(problems), **metrics}))
        return 0
    width = max(map(len, metrics))
    print(f"{'problems':{width}}  {len(problems)}")
    for name, value in metrics.items():
        print(f"{name:{width}}  {value:.4f}")
    return 0
