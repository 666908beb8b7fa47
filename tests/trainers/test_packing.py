"""Documents packed into rows train a model like one document per row: attention, recurrences and
losses do not cross documents."""

import numpy as np
import pytest

from maxtext.input_pipeline import ShardSpec, Split
from tests.support.batches import make_iterator
from tests.support.training_families import DELTA, EXPERTS, LATENT, SGD, WINDOW, kinds

MODELS = {
    "attention": ("decoder_block=llama2", "base_num_decoder_layers=2"),
    "window": ("decoder_block=mistral", *WINDOW),
    "latent": LATENT,
    "experts": ("decoder_block=mixtral", *EXPERTS),
    "delta": (
        "decoder_block=qwen3_5",
        *(override for override in DELTA if "rotary" not in override),  # no layer has RoPE
        *kinds("linear", "linear"),
    ),
    "delta and attention": (
        "decoder_block=qwen3_next",
        *EXPERTS,
        *DELTA,
        *kinds("linear", "full"),
        "shared_experts=1",
    ),
}
QUICK = {"attention", "delta"}
STEPS = 3
ROWS = 64  # more than any batch has


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("documents")
    generator = np.random.default_rng(3)
    for number in range(36):
        letters = generator.choice(list("abcdefghij "), int(generator.integers(1, 15)))
        (folder / f"{number:02}.txt").write_text("".join(letters))
    return folder


def batch_of(bench, files, rows, **how):
    """All documents in one batch of `rows` rows."""
    config = bench.config.model_copy(
        update={
            "grain_train_files": str(files), "grain_file_type": "text", "tokenizer_path": "byte",
            "generate_padding_batch_train": True, "enable_data_shuffling": False, **how,
        }
    )  # fmt: skip
    iterator = make_iterator(config, Split.TRAIN, ShardSpec(rows))
    batch = next(iterator)
    assert next(iterator, None) is None
    return batch


# concat_then_split cuts documents where rows end: the parts are compared, with two models.
CASES = [
    pytest.param(name, packing, marks=() if name in QUICK else pytest.mark.slow)
    for name in MODELS
    for packing in ("first_fit", "best_fit", "concat_then_split")
    if packing != "concat_then_split" or name in QUICK
]


@pytest.mark.parametrize(("name", "packing"), CASES)
def test_packed_training_equals_unpacked_training(make_bench, files, name, packing):
    bench = make_bench(*MODELS[name], *SGD, "vocab_size=259", "load_balance_loss_weight=0")
    alone = batch_of(bench, files, 36, packing=False)
    packed = batch_of(bench, files, 24, packing=True, grain_packing_type=packing)
    if packing == "concat_then_split":  # the same parts of documents, one per row
        alone = one_a_row(packed)
    assert packed["inputs_segmentation"].max() >= 3
    assert (
        (packed["targets_segmentation"] != 0).sum()
        == (alone["targets_segmentation"] != 0).sum()
        > 250
    )
    packed, alone = pad_rows(packed), pad_rows(alone)  # one shape, one program
    packed_state, unpacked_state = bench.state, bench.state
    for step in range(STEPS):
        packed_state, packed_metrics = bench(packed, packed_state)
        unpacked_state, alone_metrics = bench(alone, unpacked_state)
        assert packed_metrics["loss"] == pytest.approx(alone_metrics["loss"], rel=1e-5)
        if step == 0:
            assert packed_metrics["raw_grad_norm"] == pytest.approx(
                alone_metrics["raw_grad_norm"], rel=1e-5
            )


def pad_rows(batch):
    """The batch with rows of padding added."""
    more = ROWS - len(batch["inputs"])
    assert more > 0
    return {field: np.pad(array, ((0, more), (0, 0))) for field, array in batch.items()}


def one_a_row(packed):
    rows = []
    for row in range(len(packed["inputs"])):
        for segment in range(1, packed["inputs_segmentation"][row].max() + 1):
            is_segment = packed["inputs_segmentation"][row] == segment
            unpacked = {field: np.zeros_like(array[row]) for field, array in packed.items()}
            for field, array in packed.items():
                unpacked[field][: is_segment.sum()] = (
                    1 if "segmentation" in field else array[row][is_segment]
                )
            rows.append(unpacked)
    return {field: np.stack([row[field] for row in rows]) for field in rows[0]}
