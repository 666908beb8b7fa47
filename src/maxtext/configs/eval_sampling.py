"""Named ways to sample responses in evaluation: eval_sampling_strategy and generation_configs."""

from collections.abc import Mapping

from maxtext.common.types import Json
from maxtext.configs.types import Settings

FIELDS = ("eval_temperature", "eval_top_k", "eval_top_p")
STRATEGIES = {
    "greedy": {"eval_temperature": 0.01, "eval_top_k": 1, "eval_top_p": 1.0},
    "standard": {"eval_temperature": 0.7, "eval_top_k": 50, "eval_top_p": 0.95},
    "liberal": {"eval_temperature": 0.85, "eval_top_k": 2000, "eval_top_p": 1.0},
}


def evaluation_sampling(name: str, generation_configs: Json) -> Json:
    """temperature, top_k and top_p of a strategy. A field that an entry of generation_configs
    leaves out is that of the built-in strategy of its name, or of standard."""
    defaults = STRATEGIES.get(name, STRATEGIES["standard"])
    entry = defaults | generation_configs.get(name, {})
    return {field.removeprefix("eval_"): entry[field] for field in FIELDS}


def sampling_problem(settings: Settings) -> str | None:
    """A problem with generation_configs or the name of the strategy, or None."""
    for name, entry in settings.generation_configs.items():
        if not isinstance(entry, Mapping):
            return f"generation_configs.{name} must map {', '.join(FIELDS)} to numbers"
        unknown = next((field for field in entry if field not in FIELDS), None)
        if unknown is not None:
            return f"generation_configs.{name} has {unknown!r}: its keys are {', '.join(FIELDS)}"
        wrong = next((field for field in entry if not is_number(entry[field])), None)
        if wrong is not None:
            return f"generation_configs.{name}.{wrong}={entry[wrong]!r} is not a number"
    names = STRATEGIES | settings.generation_configs
    if settings.eval_sampling_strategy not in names:
        return (
            f"eval_sampling_strategy={settings.eval_sampling_strategy!r} is not known: use one of "
            f"{', '.join(names)}, or add it to generation_configs"
        )
    sampling = evaluation_sampling(settings.eval_sampling_strategy, settings.generation_configs)
    temperature, top_k, top_p = (sampling[key] for key in ("temperature", "top_k", "top_p"))
    if not temperature >= 0 or not 0 < top_p <= 1 or top_k < -1 or not isinstance(top_k, int):
        return (
            f"generation_configs.{settings.eval_sampling_strategy} needs eval_temperature of at "
            "least 0, eval_top_p above 0 and at most 1, and a whole eval_top_k of at least -1"
        )
    return None


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
