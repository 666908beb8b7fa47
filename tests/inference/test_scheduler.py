"""Continuous batching: whatever shares the batch, each request gets the tokens that it gets alone.

The oracle is another route: all tokens computed anew for each new one, one request at a time, by no
part of the engine.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.common.errors import ConfigError
from maxtext.configs import load
from maxtext.configs.derive import Devices
from maxtext.configs.sources import from_overrides
from maxtext.inference import engine
from maxtext.inference import scheduler as scheduler_module
from maxtext.inference.engine import Engine, Programs
from maxtext.inference.sampling import Kind, Rows, Sampling, draw
from maxtext.inference.scheduler import Request
from maxtext.inference.serving import make_scheduler
from maxtext.kernels.decode import paged_attention as decode
from maxtext.layers.inputs import LayerInputs
from maxtext.models.transformer import initial_weights, make_template
from maxtext.sharding import AxisRules, make_mesh
from tests.models.test_steps import MODELS as STEPPED
from tests.models.test_steps import SIZES

pytestmark = pytest.mark.usefixtures("quick_programs")

VOCABULARY, LENGTH = 41, 64
MODELS = {
    **STEPPED,
    "learned positions": [*STEPPED["learned positions"], f"trainable_position_size={LENGTH}"],
}
KINDS = {**MODELS, "recomputed": ["decoder_block=llama2", "base_num_decoder_layers=2", "moba=true", "moba_chunk_size=4",
                                  "moba_topk=2"]}  # fmt: skip


def configuration(*words, devices=1):
    last = {
        word.partition("=")[0]: word for word in (*SIZES, f"max_target_length={LENGTH}", *words)
    }
    return load(None, from_overrides(last.values()), environ={}, devices=Devices(devices))


def programs_of(config):
    return Programs(config, make_template(config), AxisRules.of(config, make_mesh(config)))


@functools.cache
def compiled(kind, *words):
    """The programs of a kind: what one test has compiled the others need not."""
    return programs_of(configuration(*KINDS[kind], *words))


@functools.cache
def drawn_weights(kind):
    """Larger than at the start of training, so that scores differ clearly."""
    random = np.random.default_rng(0)
    shapes = make_template(configuration(*KINDS[kind])).weights
    return jax.tree.map(
        lambda leaf: jnp.asarray(random.normal(0, 0.5, leaf.shape), leaf.dtype), shapes
    )


def alone(programs, weights):
    """The tokens of a request: what follows a token does not change its scores, so one length is
    one program.
    """

    def follows(weights, row, count, seed, sampling):
        model = programs.template.bind(weights)
        hidden, _ = model.hidden(row[None], LayerInputs(jnp.arange(LENGTH)[None]))
        key = jax.random.fold_in(
            jax.random.key(seed), count
        )  # a token's draw is that of its seed and its place
        return draw(model.logits(hidden[:, count - 1]), key[None], sampling, Kind.TRUNCATED)[0]

    program, known = jax.jit(follows), {}

    def tokens(request):
        if request not in known:
            ids, row = list(request.ids), np.zeros(LENGTH, np.int32)
            while len(ids) < len(request.ids) + request.count:
                row[: len(ids)] = ids
                with programs.context():
                    seed = np.uint32(request.seed)
                    ids.append(
                        int(
                            program(
                                weights, row, np.int32(len(ids)), seed, Rows.of([request.sampling])
                            )
                        )
                    )
                if ids[-1] in request.ends:
                    break
            known[request] = ids[len(request.ids) :]
        return known[request]

    return tokens


@pytest.fixture(scope="module")
def models():
    """By kind: (weights, the tokens of requests alone)."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = drawn_weights(name), alone(compiled(name), drawn_weights(name))
        return made[name]

    return get


def random_request(random, prompts=(1, 30), counts=(1, 20), greedy=0.5, prefixes=()):
    ids = random.integers(0, VOCABULARY, random.integers(*prompts)).tolist()
    if len(prefixes) and random.random() < 0.7:
        start = prefixes[random.integers(len(prefixes))]
        ids = [*start[: random.integers(1, len(start) + 1)], *ids][: prompts[1]]
    sampling = Sampling() if random.random() < greedy else Sampling(*[(1.0, 0, 1.0), (2.0, 7, 1.0), (1.5, 0, 0.8),
                                                                     (1.5, 9, 0.7)][random.integers(4)])  # fmt: skip
    ends = (int(random.integers(VOCABULARY)),) if random.random() < 0.3 else ()
    return Request(
        tuple(ids), int(random.integers(*counts)), sampling, int(random.integers(1 << 31)), ends
    )


def serve(scheduler, requests, random):
    """The tokens of each, with requests that come at random times."""
    found = {number: [] for number in range(len(requests))}
    finished, waiting = set(), list(enumerate(requests))
    while waiting or scheduler.busy:
        for _ in range(min(len(waiting), int(random.integers(0, 4)))):
            number, request = waiting.pop(0)
            assert scheduler.refusal(request) is None
            scheduler.add(number, request)
        for news in scheduler.step():
            assert news.number not in finished
            found[news.number] += news.tokens
            if news.finished:
                assert news.error is None
                finished.add(news.number)
        scheduler.pages.check()
    assert finished == set(found)
    assert scheduler.pages.held == 0
    assert sorted(scheduler.slots) == list(range(scheduler.engine.size.slots))
    return list(found.values())


LAYOUTS = {
    "a page each": [],
    "chunked": ["use_chunked_prefill=true", "prefill_chunk_size=7"],
    "few pages": ["attention=paged", "pagedattn_num_pages=14", "pagedattn_tokens_per_page=4"],
    "prefixes": ["enable_prefix_caching=true", "pagedattn_tokens_per_page=4"],
    "few pages, prefixes in host memory": [
        "attention=paged", "pagedattn_num_pages=16", "pagedattn_tokens_per_page=4", "enable_prefix_caching=true",
        "prefix_caching_hbm_byte=4096", "use_chunked_prefill=true", "prefill_chunk_size=9",
    ],
}  # fmt: skip
HARDEST = "few pages, prefixes in host memory"
CASES = [
    pytest.param("window", "prefixes"),
    *(
        pytest.param("causal", layout, marks=pytest.mark.slow)
        for layout in LAYOUTS
        if layout != "few pages"
    ),
    *(pytest.param(kind, HARDEST, marks=pytest.mark.slow) for kind in MODELS if kind != "causal"),
    pytest.param("recomputed", "chunked", marks=pytest.mark.slow),
]


@pytest.mark.slow
def test_requests_are_served_as_if_alone(models, monkeypatch):
    """In programs of many shapes, with pages that do not suffice for all."""
    sizes = some_slots_at_a_time(monkeypatch, 1)
    check_served(models, "causal", "few pages")
    assert sizes >= {1, 2}  # of four


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_every_kind_of_cache_in_every_layout(models, kind, layout):
    check_served(models, kind, layout)


def check_served(models, kind, layout):
    weights, alone = models(kind)
    scheduler = make_scheduler(compiled(kind, *LAYOUTS[layout]), weights, 4, LENGTH)
    random = np.random.default_rng(3)
    prefixes = random.integers(0, VOCABULARY, (2, 18)).tolist()
    requests = [random_request(random, prefixes=prefixes) for _ in range(14)]
    # Whose first token depends on what is known of their beginning, whatever the window of a layer.
    requests += [Request((*prefixes[0], token), 6) for token in range(3)]
    assert serve(scheduler, requests, random) == [alone(request) for request in requests]
    if "prefixes" in layout:
        assert scheduler.pages.hits > 0
    if layout == "few pages":
        assert scheduler.preempted > 0


@pytest.mark.slow
@pytest.mark.usefixtures("few_programs")
def test_ties_between_blocks_of_keys():
    """Without keys every block of MoBA has the same gate; a padded row chooses as one without
    padding does.
    """

    def without_keys(path, leaf):
        return (
            jnp.zeros_like(leaf)
            if any(getattr(key, "key", None) == "key" for key in path)
            else leaf
        )

    weights = jax.tree_util.tree_map_with_path(without_keys, drawn_weights("recomputed"))
    unchanged = jax.tree.map(jnp.array_equal, weights, drawn_weights("recomputed"))
    assert not all(jax.tree.leaves(unchanged))
    programs = compiled("recomputed")
    requests = [Request(tuple(range(3, 20)), 4), Request((5, 6, 7), 4)]
    expected = []
    for request in requests:
        ids = list(request.ids)
        for _ in range(request.count):
            with programs.context():
                model = programs.template.bind(weights)
                hidden, _ = model.hidden(
                    jnp.asarray([ids]), LayerInputs(jnp.arange(len(ids))[None])
                )
                ids.append(int(model.logits(hidden[:, -1:])[0, 0].argmax()))
        expected.append(ids[len(request.ids) :])
    assert make_scheduler(programs, weights, 4, LENGTH).run(requests) == expected


def some_slots_at_a_time(monkeypatch, least):
    """Programs for a quarter or half of the slots, if they have so many; what they have is
    collected.
    """
    sizes = set()

    def spied(engine, table, *others, decode=Engine.decode, **how):
        sizes.add(len(table))
        return decode(engine, table, *others, **how)

    monkeypatch.setattr(engine, "LEAST_ROWS", least)
    monkeypatch.setattr(Engine, "decode", spied)
    return sizes


@pytest.mark.slow
@pytest.mark.usefixtures("few_programs")
def test_two_hundred_requests(models, monkeypatch):
    """In a pool that is too small for all that are at work, with shared prefixes."""
    sizes = some_slots_at_a_time(monkeypatch, 2)
    weights, alone = models("causal")
    words = [
        "attention=paged",
        "pagedattn_num_pages=36",
        "pagedattn_tokens_per_page=4",
        "enable_prefix_caching=true",
    ]
    scheduler = make_scheduler(compiled("causal", *words), weights, 8, LENGTH)
    random = np.random.default_rng(5)
    prefixes = random.integers(0, VOCABULARY, (3, 20)).tolist()
    requests = [random_request(random, prompts=(1, 40), prefixes=prefixes) for _ in range(200)]
    assert serve(scheduler, requests, random) == [alone(request) for request in requests]
    assert scheduler.preempted > 0
    assert scheduler.pages.hits > 200
    assert sizes >= {2, 4}  # of eight


@pytest.fixture
def packing(monkeypatch):
    """Prompts share rows of 48 tokens; how many did each time is collected."""
    counts = []

    def spied(engine, prompts, prefill=Engine.prefill, **how):
        if prompts.segments is not None:
            assert prompts.ids.shape == (1, 48)
            counts.append(int(prompts.segments.max()))
        return prefill(engine, prompts, **how)

    monkeypatch.setattr(Engine, "packs", True)
    monkeypatch.setattr(Engine, "prefill", spied)
    monkeypatch.setattr(scheduler_module, "PACKED", 48)
    monkeypatch.setattr(scheduler_module, "PACKED_PROMPTS", (2, 4))
    monkeypatch.setattr(scheduler_module, "SOME_ROWS", 2)
    return counts


@pytest.mark.parametrize(
    ("kind", "words", "shared"),
    [
        ("causal", ["attention=paged", "dtype=bfloat16"], True),
        (
            "causal",
            ["enable_prefix_caching=true", "attention=autoselected", "dtype=bfloat16"],
            True,
        ),
        (
            "causal",
            ["enable_prefix_caching=true", "dtype=bfloat16"],
            False,
        ),  # attention is dot_product here
        ("causal", ["attention=paged"], False),  # in float32, each would look at all the others
        ("causal", ["attention=paged", "dtype=bfloat16", "attn_logits_soft_cap=5"], False),
        ("causal", ["attention=autoselected", "dtype=bfloat16"], False),  # a page for each slot
        ("window", ["attention=paged", "dtype=bfloat16"], False),  # slots have rings
        ("latent", ["attention=paged", "dtype=bfloat16"], False),
    ],
)
def test_where_prompts_share_rows(kind, words, shared, monkeypatch):
    """On a GPU, or to make believe."""
    made = make_scheduler(compiled(kind, *words), None, 2, LENGTH).engine
    assert not made.packs
    monkeypatch.setattr(engine, "platform", lambda rules: "gpu")
    other = Engine(made.programs, None, made.size)
    assert other.packs == shared


@pytest.mark.parametrize("kind", ["causal", pytest.param("latent", marks=pytest.mark.slow)])
def test_prompts_that_share_a_row(models, packing, kind):
    weights, alone = models(kind)
    words = ["attention=paged", "pagedattn_num_pages=80", "pagedattn_tokens_per_page=4"]
    scheduler = make_scheduler(compiled(kind, *words), weights, 6, LENGTH)
    random = np.random.default_rng(4)
    requests = [random_request(random, counts=(1, 6)) for _ in range(16)]
    assert scheduler.run(requests) == [alone(request) for request in requests]
    assert {2, 4} <= set(packing)


@pytest.mark.slow
@pytest.mark.usefixtures("few_programs")
def test_the_kernel_for_pages(monkeypatch):
    """Interpreted, in place of gathered pages; with a block of its own size for each key that says
    it.
    """
    words = ["decoder_block=llama2", "base_num_decoder_layers=1", "head_dim=16", "attention=paged",
             "pagedattn_num_pages=30", "pagedattn_tokens_per_page=16"]  # fmt: skip
    ragged = ["use_ragged_attention=true", "ragged_block_size=8"]
    random = np.random.default_rng(7)
    requests = [random_request(random) for _ in range(3)]
    weights = jax.jit(lambda: initial_weights(configuration(*words)))()

    def tokens(*more):
        return make_scheduler(programs_of(configuration(*words, *more)), weights, 2, LENGTH).run(
            requests
        )

    with pytest.raises(
        ConfigError,
        match="use_ragged_attention=true cannot do this: it is a kernel for NVIDIA GPUs",
    ):
        tokens(*ragged)
    gathered = tokens()
    blocks = []

    def interpreted(*arrays, attend=decode.paged_attention, **options):
        blocks.append(options["block"])
        return attend(*arrays, interpret=True, **options)

    monkeypatch.setattr(decode, "supports", lambda *facts: None)
    monkeypatch.setattr(decode, "paged_attention", interpreted)
    assert tokens(*ragged) == gathered
    assert set(blocks) == {8}


def test_log_probabilities(models):
    """Of each new token, the logarithm of the softmax of the model's scores, whatever it was drawn
    by.
    """
    weights, _ = models("causal")
    programs = compiled("causal")
    scheduler = make_scheduler(programs, weights, 2, LENGTH)
    request = Request((5, 6, 7), 6, Sampling(1.5, 9, 0.9), 11, log_probs=True)
    scheduler.add(0, request)
    scheduler.add(1, dataclasses.replace(request, log_probs=False))
    tokens, found, quiet = [], [], []
    while scheduler.busy:
        for news in scheduler.step():
            (quiet if news.number else tokens).extend(news.tokens)
            found += news.log_probs
            assert news.number == 0 or not news.log_probs
    assert tokens == quiet
    ids = np.array([[*request.ids, *tokens]])
    param_infos = np.arange(ids.shape[1])[None]
    scores = np.asarray(programs.template.bind(weights)(ids, param_infos)[0], np.float64)
    shares = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    expected = [shares[len(request.ids) - 1 + place, token] for place, token in enumerate(tokens)]
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_a_request_that_is_cancelled_makes_room(models):
    weights, alone = models("causal")
    scheduler = make_scheduler(compiled("causal"), weights, 1, LENGTH)
    first, second = Request((1, 2), 60), Request((3, 4), 9)
    scheduler.add(0, first)
    scheduler.add(1, second)
    tokens, cancelled = [], False
    while scheduler.busy:
        for news in scheduler.step():
            if news.number == 0 and not cancelled:
                scheduler.cancel(0)
                cancelled = True
            elif news.number == 1:
                tokens += news.tokens
    assert cancelled
    assert tokens == alone(second)


REFUSED = {
    "empty": (Request((), 3), "the prompt is empty"),
    "no tokens wanted": (Request((1,), 0), "max_new_tokens=0 must be a whole number of at least 1"),
    "unknown id": (Request((1, 41), 3), "token id 41 is outside the vocabulary, 0 to 40"),
    "negative id": (Request((1, -1), 3), "token id -1 is outside the vocabulary"),
    "too long": (Request((1,) * 60, 5), "a prompt of 60 tokens and 5 new ones do not fit into 64"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(models, name):
    request, sentence = REFUSED[name]
    scheduler = make_scheduler(compiled("causal"), models("causal")[0], 1, LENGTH)
    assert sentence in scheduler.refusal(request)


def test_a_sequence_needs_no_more_pages_than_there_are(models):
    words = ["attention=paged", "pagedattn_num_pages=5", "pagedattn_tokens_per_page=4"]
    scheduler = make_scheduler(compiled("causal", *words), models("causal")[0], 2, LENGTH)
    assert "do not fit into 20" in scheduler.refusal(Request((1,) * 12, 9))
    assert scheduler.refusal(Request((1,) * 12, 8)) is None
    words += ["pagedattn_max_pages_per_group=3"]
    scheduler = make_scheduler(compiled("causal", *words), models("causal")[0], 2, LENGTH)
    assert "do not fit into 12" in scheduler.refusal(Request((1,) * 5, 8))


@pytest.mark.slow
@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize(
    ("kind", "layout"), [("causal", "few pages"), ("causal", "prefixes"), ("window", "prefixes")]
)
def test_one_that_breaks_leaves_the_others_whole(models, kind, layout):
    check_broken(models, kind, layout)


@pytest.mark.slow
def test_one_that_breaks_leaves_those_in_its_row_whole(models, packing):
    check_broken(models, "causal", "few pages")
    assert packing


@pytest.mark.slow
def test_keys_that_are_no_numbers_are_told_in_a_shared_row(models, packing):
    """Though all else that a request's tokens are made of is finite."""

    def broken(path, leaf):
        return leaf * 1e38 if [step.key for step in path[-2:]] == ["key", "kernel"] else leaf

    words = ["attention=paged", "pagedattn_num_pages=80", "pagedattn_tokens_per_page=4"]
    weights = jax.tree.map_with_path(broken, models("causal")[0])
    scheduler = make_scheduler(compiled("causal", *words), weights, 6, LENGTH)
    for number in range(6):
        scheduler.add(number, Request((1, 2, number, *range(9)), 3))
    told = [news for _ in range(3) for news in scheduler.step()]
    assert [news.finished for news in told] == ["error"] * 6
    assert not any(news.tokens for news in told)
    assert packing


def check_broken(models, kind, layout):
    """The embedding of one token is no number: who has it is told so, who comes with it or after it
    notices nothing.
    """
    weights, alone = models(kind)
    table = weights["embedder"]["embedding"]
    broken = {**weights, "embedder": {"embedding": table.at[VOCABULARY - 1].set(np.nan)}}
    scheduler = make_scheduler(compiled(kind, *LAYOUTS[layout]), broken, 4, LENGTH)
    random = np.random.default_rng(11)
    good = [Request(tuple(random.integers(0, VOCABULARY - 1, 20).tolist()), 6) for _ in range(6)]
    bad = Request((*good[0].ids[:9], VOCABULARY - 1, *range(9)), 8)
    order = [bad, good[0], good[1], bad, *good[2:]]
    for number, request in enumerate(order):
        scheduler.add(number, request)
    found, finished = {number: [] for number in range(len(order))}, {}
    while scheduler.busy:
        for news in scheduler.step():
            found[news.number] += news.tokens
            finished[news.number] = news.finished
    assert [finished[number] for number in (0, 3)] == ["error", "error"]
    for number, request in enumerate(order):
        if request is not bad:
            expected = alone(request)
            if VOCABULARY - 1 not in expected:
                assert (found[number], finished[number]) == (expected, "length")
    scheduler.pages.check()


def test_broken_weights_are_told(models):
    weights, _ = models("causal")
    broken = jax.tree.map(lambda x: x * np.nan, weights)
    scheduler = make_scheduler(compiled("causal"), broken, 1, LENGTH)
    scheduler.add(0, Request((1, 2), 5))
    news = [each for _ in range(3) for each in scheduler.step()]
    assert [each.finished for each in news] == ["error"]
    assert "scores are not numbers" in news[0].error
