"""A trained model for inference."""

from maxtext.checkpoint.open import Checkpoint
from maxtext.inference.llm import LLM
from maxtext.models.transformer import make_template
from maxtext.trainers.pretrain import Result


def trained_llm(result: Result, checkpoint: Checkpoint | None) -> LLM:
    """The model of a run with its weights, which the LLM owns from here on. `checkpoint`: the
    folder that the run started from, for the tokenizer and the files of Hugging Face."""
    config = result.context.config
    return LLM(config, make_template(config), result.state.weights, checkpoint)
