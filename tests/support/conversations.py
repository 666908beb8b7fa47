"""Scripted conversations."""

from maxtext.inference.requests import GenerationRequest
from maxtext.inference.sampling.params import SamplingParams
from maxtext.trainers.methods.rl.agents.conversations import Conversation
from maxtext.trainers.methods.rl.rollout import Rollout

# As Qwen's: schemas in the system message, results of tools in a turn of the user.
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "<tool_call><|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ 'user' if message.role == 'tool' else message.role"
    " }}\n{% if message.role == 'tool' %}<tool_response>\n{{ message.content }}\n</tool_response>"
    "{% else %}{{ message.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first
        b: The second
    """
    return a + b


def spell(tokenizer, text):
    """Tokens of single bytes: no tokenizer would write a text like this, but a model may."""
    return [token for character in text for token in tokenizer.encode(character)]


class ScriptedSampler:
    """Turns by conversation; texts, which end with <|im_end|>, or ids."""

    def __init__(self, tokenizer, turns):
        self.tokenizer = tokenizer
        self.turns = {index: list(texts) for index, texts in turns.items()}
        self.queue = []
        self.requests = []
        self.max_open = 0

    def add(self, index, request):
        self.queue.append((index, request))
        self.requests.append((index, request))

    def step(self):
        self.max_open = max(self.max_open, len(self.queue))
        index, request = self.queue.pop()
        text = self.turns[index].pop(0)
        reason = "end"
        if isinstance(text, str):
            ids = spell(self.tokenizer, text)
            reason = "length" if text.endswith("…") else "stop" if text.endswith("STOP") else "end"
            ids += [4] if reason == "end" else []  # <|im_end|>
        else:
            ids = text
        ids = ids[: request.params.max_new_tokens]
        log_probs = tuple(-0.25 * (number + 1) for number in range(len(ids)))
        rollout = Rollout(tuple(request.prompt), tuple(ids), log_probs, finish_reason=reason)
        return {index: rollout}


def conversation(index, environment, prompt="2+3?"):
    request = GenerationRequest((), SamplingParams(temperature=1.0, seed=index, logprobs=0))
    return Conversation(index, {"prompt": prompt}, environment, request)
