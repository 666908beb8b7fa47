"""Heads that draft from what the model computed at earlier tokens: their drafts are those of the
head over whole sequences, without caches, and they change no token.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.inference.engine.batches import NO_TOKEN
from maxtext.inference.engine.draft_heads import MtpProposer
from maxtext.inference.engine.engine import InferenceEngine
from maxtext.layers.inputs import LayerInputs
from tests.support.drafts import recorded_drafts
from tests.support.random_requests import (
    HARDEST,
    LAYOUTS,
    LENGTH,
    compiled,
    new_request,
    random_request,
    random_weights,
    reference,
)

NUM_DRAFTS = 3
MTP = ("mtp_num_layers=1",)
CASES = [
    ("causal", HARDEST),
    ("window", "prefixes"),
    ("latent", "contiguous"),
    ("chunks", "chunked"),
    ("sinks, windows and experts", HARDEST),
    ("streams", "few blocks"),
    ("delta", HARDEST),
]


@pytest.fixture(autouse=True)
def drafts_always(monkeypatch):
    """Engines draft whether that pays or not."""
    monkeypatch.setattr("maxtext.inference.engine.acceptance.PAUSE_PROGRAMS", 0)


def mtp_engine(kind, layout, slots=4):
    programs = compiled(kind, *MTP, *LAYOUTS[layout])
    programs = replace(programs, proposer=MtpProposer(NUM_DRAFTS, config=programs.config))
    return InferenceEngine(programs, random_weights(kind, *MTP), slots, LENGTH)


def head_drafts(model, tokens):
    """The greedy drafts after `tokens` of the first MTP layer, over the whole sequence."""
    positions = jnp.arange(len(tokens) - 1)[None]
    hidden, _ = model.run(jnp.asarray([tokens[:-1]]), LayerInputs(positions))
    following, drafts = list(tokens[1:]), []
    for _ in range(NUM_DRAFTS):
        ids = jnp.asarray([following])
        inputs = LayerInputs(jnp.arange(len(following))[None], tokens=ids)
        outputs, logits_input, _ = model.mtp.layers[0](hidden, model.embed(ids), inputs)
        drafts.append(int(model.logits(logits_input)[0, -1].argmax()))
        following.append(drafts[-1])
        hidden = jnp.concatenate([hidden, outputs[:, -1:]], axis=1)
    return drafts


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize(("kind", "layout"), CASES[:3])
def test_drafts_are_those_of_the_layer_over_the_whole_sequence(kind, layout, monkeypatch):
    steps = recorded_drafts(monkeypatch)
    engine = mtp_engine(kind, layout, slots=1)
    prompt = np.random.default_rng(1).integers(0, 41, 17).tolist()
    [tokens] = engine.generate([new_request(prompt, 20)])
    jax.effects_barrier()
    tokens = [*prompt, *tokens]
    with engine.programs.context():
        model = engine.programs.template.bind(random_weights(kind, *MTP))
        steps = [step for step in steps if step[0] >= 0]
        assert len(steps) >= 19 / (NUM_DRAFTS + 1)
        for position, drafts in steps:
            count = min(NUM_DRAFTS, len(tokens) - 2 - position)
            expected = head_drafts(model, tokens[: position + 1])[:count]
            assert drafts == expected + [NO_TOKEN] * (NUM_DRAFTS - count)


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize(
    ("kind", "layout"),
    [CASES[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES[1:])],
)
def test_mtp_changes_no_token(kind, layout):
    """Of greedy and sampled requests, more than there are slots."""
    random = np.random.default_rng(5)
    prefixes = random.integers(0, 41, (2, 18)).tolist()
    requests = [random_request(random, counts=(1, 30), prefixes=prefixes) for _ in range(9)]
    expected = reference(compiled(kind, *MTP), random_weights(kind, *MTP))
    engine = mtp_engine(kind, layout)
    assert engine.generate(requests) == [expected(request) for request in requests]
    assert engine.drafts.num_drafted > 0
