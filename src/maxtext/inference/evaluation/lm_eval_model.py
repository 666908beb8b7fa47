"""A model of lm-eval over `LLM`, registered as `maxtext`; imports lm-eval, of the extra `eval`.

Scores equal those of lm-eval's own `hf` model on the same folder: context and continuation are
encoded together, blanks at the end of a context belong to the continuation, an empty context is the
beginning-of-sequence token, and a context that is too long loses its beginning.
"""

import os
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text

from maxtext.common.errors import ConfigError, UserError
from maxtext.common.log import LOGGER
from maxtext.common.types import Json
from maxtext.inference.evaluation.loglikelihood import (
    Loglikelihood,
    TokenSpan,
    compute_loglikelihoods,
)
from maxtext.inference.llm import LLM
from maxtext.inference.requests import GenerationRequest
from maxtext.inference.sampling.params import MAX_STOP_LENGTH, MAX_STOP_TEXTS, SamplingParams
from maxtext.inference.sampling.sampler import prompt_seed
from maxtext.inference.text.session import NO_TOKENIZER
from maxtext.tokenizers import ChatTemplate, Tokenizer, chat_template

DEFAULT_MAX_GEN_TOKS = 256  # as of lm-eval's `hf` model
# Generation arguments that are fields of SamplingParams.
SAMPLING_ARGUMENTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
# Those that change nothing at these values.
NEUTRAL_ARGUMENTS = {"num_beams": 1, "use_cache": True, "num_return_sequences": 1}

Progress = Callable[[int, int, str], None]  # (requests that are done, of all, their kind)


@register_model("maxtext")
class MaxTextLM(TemplateLM):
    """`pretrained` is a loaded model, or what `LLM.load` opens with `keys`."""

    backend = "causal"

    def __init__(
        self,
        pretrained: LLM | str | os.PathLike,
        progress: Progress | None = None,
        batch_size: object = None,
        max_batch_size: object = None,
        device: object = None,
        **keys: Any,
    ):
        """Batches and devices are those of the configuration: the arguments of lm-eval are ignored.
        Raises ConfigError if the model has no tokenizer.
        """
        super().__init__()
        self.llm = pretrained if isinstance(pretrained, LLM) else LLM.load(pretrained, **keys)
        if self.llm.tokenizer is None:
            raise ConfigError(f"{NO_TOKENIZER}: name one with tokenizer_path=…")
        self.tokenizer: Tokenizer = self.llm.tokenizer
        self.progress = progress
        self.num_truncated = 0  # requests whose context lost its beginning
        self.drops_system = False  # since the chat template refuses system messages

    @property
    def max_length(self) -> int:
        return self.llm.config.max_target_length

    @property
    def eot_token_id(self) -> int:
        return self.end_ids[0]

    @cached_property
    def end_ids(self) -> list[int]:
        eos_id = self.tokenizer.eos_id
        ids = [*([] if eos_id is None else [eos_id]), *self.llm.eos_ids]
        if not ids:
            raise UserError(f"the tokenizer {self.tokenizer.name} has no end-of-sequence token")
        return ids

    @property
    def prefix_token_id(self) -> int:
        bos_id = self.tokenizer.bos_id
        return self.eot_token_id if bos_id is None else bos_id

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name).replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: object
    ) -> list[int]:
        """With the special tokens that start a text, unless the text has the first of them."""
        if add_special_tokens is None:
            prefix = self.tokenizer.id_to_token(self.prefix_token_id)
            add_special_tokens = not string.startswith(prefix)
        if add_special_tokens:
            return self.tokenizer.encode_prompt(string)
        return self.tokenizer.encode_with_specials(string)

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[object, list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: object,
    ) -> list[tuple[float, bool]]:
        """(log-likelihood of the continuation, whether it is greedy) of (_, context ids,
        continuation ids).
        """
        spans = []
        for _, context, continuation in requests:
            if len(continuation) > self.max_length:
                raise UserError(
                    f"a continuation of {len(continuation)} tokens is longer than "
                    f"max_target_length={self.max_length}: raise that key"
                )
            context = context or [self.prefix_token_id]  # one of blanks, which were moved
            # The last token is a target only.
            token_ids = [*context, *continuation][-(self.max_length + 1) :]
            self.num_truncated += len(token_ids) < len(context) + len(continuation)
            spans.append(TokenSpan(token_ids, len(token_ids) - len(continuation)))
        results = self.compute_nonempty(spans)
        return [(result.logprob, result.is_greedy) for result in results]

    def compute_nonempty(self, spans: Sequence[TokenSpan]) -> list[Loglikelihood]:
        """An empty continuation is certain."""
        nonempty = [span for span in spans if span.start < len(span.token_ids)]
        computed = iter(compute_loglikelihoods(self.llm, nonempty, self.report("loglikelihoods")))
        certain = Loglikelihood(0.0, True)
        return [next(computed) if span.start < len(span.token_ids) else certain for span in spans]

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[float]:
        """The log-likelihoods of whole texts, in windows of max_target_length tokens."""
        owners: list[int] = []
        windows: list[tuple[None, list[int], list[int]]] = []
        for index, request in enumerate(requests):
            rolling = utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for pair in rolling:
                windows.append((None, *utils.make_disjoint_window(pair)))
                owners.append(index)
        totals = [0.0] * len(requests)
        for owner, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[owner] += logprob
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Completions, cut before the first text of `until`."""
        prompts: list[GenerationRequest] = []
        stops: list[list[str]] = []
        for index, request in enumerate(requests):
            context, arguments = request.args
            params, until = self.sampling_params(arguments, index)
            limit = self.max_length - params.max_new_tokens
            token_ids = self.tok_encode(context) or [self.prefix_token_id]
            self.num_truncated += len(token_ids) > limit
            prompts.append(GenerationRequest(token_ids[-limit:], params))
            stops.append(until)
        report = self.report("completions")
        texts = [""] * len(requests)
        for done, completion in enumerate(self.llm.completions(prompts), start=1):
            if completion.error is not None:
                raise UserError(completion.error)
            token_ids = list(completion.token_ids)
            if token_ids and token_ids[-1] in self.end_ids:
                token_ids.pop()
            texts[completion.index] = postprocess_generated_text(
                self.tokenizer.decode(token_ids), stops[completion.index], None
            )
            if report is not None:
                report(done, len(requests))
        return texts

    def sampling_params(self, arguments: Json, index: int) -> tuple[SamplingParams, list[str]]:
        """The parameters of a task's generation arguments, and its stop strings. Greedy unless they
        say otherwise. Raises UserError for arguments that the engine does not have.
        """
        options = dict(normalize_gen_kwargs(dict(arguments), DEFAULT_MAX_GEN_TOKS))
        until = [text for text in options.pop("until") if text]
        max_new_tokens = options.pop("max_gen_toks")
        if not 0 < max_new_tokens < self.max_length:
            raise UserError(
                f"the task generates {max_new_tokens} tokens, and max_target_length="
                f"{self.max_length} has to hold them and a prompt: raise that key"
            )
        if not options.pop("do_sample"):
            options["temperature"] = 0.0
        unknown = {
            name: value
            for name, value in options.items()
            if name not in SAMPLING_ARGUMENTS and NEUTRAL_ARGUMENTS.get(name) != value
        }
        if unknown:
            raise UserError(
                f"the task generates with {', '.join(f'{k}={v}' for k, v in unknown.items())}, "
                f"and only {', '.join(SAMPLING_ARGUMENTS)} are supported"
            )
        fields = {name: options[name] for name in SAMPLING_ARGUMENTS if name in options}
        fields["seed"] = prompt_seed(int(fields.get("seed", 0)), index)
        # Further texts cut the completion afterwards, though they do not end it.
        stop = tuple(text for text in until if len(text) <= MAX_STOP_LENGTH)[:MAX_STOP_TEXTS]
        return SamplingParams(max_new_tokens=max_new_tokens, stop=stop, **fields), until

    def report(self, kind: str) -> Callable[[int, int], None] | None:
        progress = self.progress
        return None if progress is None else lambda done, total: progress(done, total, kind)

    @cached_property
    def template(self) -> ChatTemplate:
        template = chat_template(self.llm.config, self.tokenizer)
        if template is None:
            raise ConfigError(
                f"the tokenizer {self.tokenizer.name} has no chat template: set "
                "chat_template_path, or leave --apply-chat-template out"
            )
        return template

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self.template.source if chat_template else None

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The conversation as text. Without `add_generation_prompt`, the last message is the
        beginning of the model's, so the text ends with its content. System messages are left out if
        the template refuses them.
        """
        render = self.template.render_open
        if add_generation_prompt:
            render = partial(self.template.render, add_generation_prompt=True)
        try:
            return render(chat_history)
        except UserError:
            others = [message for message in chat_history if message["role"] != "system"]
            if len(others) == len(chat_history):
                raise
            text = render(others)
        if not self.drops_system:
            LOGGER.warning("the chat template refuses system messages: they are left out")
            self.drops_system = True
        return text
