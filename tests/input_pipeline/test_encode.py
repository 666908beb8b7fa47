"""Records to token ids, compared with the tokenizers' own libraries: documents and chats."""

import json

import numpy as np
import pytest

from maxtext.common.errors import ConfigError, UserError
from tests.support.batches import make_train_iterator
from tests.tokenizers.tiny import CORPUS, write_bpe, write_sentencepiece, write_tiktoken

ROWS = {"packing": False, "max_target_length": 600, "vocab_size": 1000, "grain_file_type": "jsonl"}


def lines(folder, records):
    folder.mkdir(exist_ok=True)
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    return str(folder)


def tokens_of(config):
    """Each document's tokens, put together again from inputs and targets."""
    sequences = []
    for batch in make_train_iterator(config):
        (used,) = batch["targets_segmentation"] != 0
        sequences.append([int(batch["inputs"][0, 0]), *batch["targets"][0, used].tolist()])
    return sequences


def by_library(kind, path):
    if kind == "huggingface":
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        return lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    import sentencepiece

    return sentencepiece.SentencePieceProcessor(model_file=str(path)).encode


@pytest.mark.parametrize("kind", ["huggingface", "sentencepiece"])
def test_documents(make_config, tmp_path, kind):
    initializers = {"huggingface": write_bpe, "sentencepiece": write_sentencepiece}
    path = initializers[kind](tmp_path / {"huggingface": "bpe", "sentencepiece": "a.model"}[kind])
    config = make_config(
        grain_train_files=lines(tmp_path / "data", [{"text": text} for text in [*CORPUS, "", "x"]]),
        tokenizer_path=str(path),
        **ROWS,
    )
    encode = by_library(kind, path)
    assert tokens_of(config) == [[1, *encode(text), 2] for text in [*CORPUS, "x"]]
    bare = config.model_copy(update={"add_bos": False, "add_eos": False})
    assert tokens_of(bare)[: len(CORPUS)] == [encode(text) for text in CORPUS]


def test_tokenizer_larger_than_vocab_size_raises(make_config, tmp_path):
    data = lines(tmp_path / "data", [{"text": "a text"}])
    for path in (
        write_bpe(tmp_path / "bpe"),
        write_sentencepiece(tmp_path / "a.model"),
        write_tiktoken(tmp_path / "a.tiktoken"),
    ):
        with pytest.raises(ConfigError, match="vocab_size=300"):
            make_train_iterator(
                make_config(
                    grain_train_files=data, tokenizer_path=str(path), **ROWS | {"vocab_size": 300}
                )
            )


CHATS = [
    [
        {"role": "user", "content": "How are you?"},
        {"role": "assistant", "content": "Fine, the quick brown fox."},
    ],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "7 wizards?"}],
]


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    from transformers import AutoTokenizer

    folder = write_bpe(tmp_path_factory.mktemp("bpe"))
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def ids(messages):
        return list(
            tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
        )

    return folder, ids


@pytest.mark.parametrize("form", ["messages", "text", "columns"])
def test_chats(make_config, tmp_path, chat_model, form):
    folder, ids = chat_model
    chats = CHATS if form != "columns" else CHATS[:1]
    records = [{"messages": messages} for messages in chats]
    if form == "text":
        records = [{"messages": json.dumps(messages)} for messages in chats]
    if form == "columns":
        records = [
            {"prompt": messages[0]["content"], "completion": messages[1]["content"]}
            for messages in chats
        ]
    config = make_config(
        grain_train_files=lines(tmp_path / "data", records),
        tokenizer_path=str(folder),
        use_chat_template=True,
        train_data_columns=["prompt", "completion"] if form == "columns" else ["messages"],
        **ROWS,
    )
    assert tokens_of(config) == [ids(messages) for messages in chats]


def test_bad_chats(make_config, tmp_path, chat_model):
    folder, ids = chat_model
    records = [{"messages": value} for value in ("no JSON", [1], {"role": "user"}, CHATS[0])]
    settings = {
        "grain_train_files": lines(tmp_path / "data", records),
        "tokenizer_path": str(folder),
        "use_chat_template": True,
        "train_data_columns": ["messages"],
        **ROWS,
    }
    for allowed, said in enumerate(
        ["line 1.*not JSON", "line 2.*list of messages", "line 3.*list of messages"]
    ):
        with pytest.raises(UserError, match=said):
            tokens_of(make_config(**settings, max_bad_records=allowed))
    assert tokens_of(make_config(**settings, max_bad_records=3)) == [ids(CHATS[0])]
    with pytest.raises(ConfigError, match="tokenize_train_data=false reads tokens"):
        tokens_of(make_config(**settings, tokenize_train_data=False))


def test_special_tokens_in_documents_are_text(make_config, tmp_path, chat_model):
    """The text "</s>" in a document is not the end token."""
    folder, _ = chat_model
    data = lines(tmp_path / "data", [{"text": "a </s> b"}])
    (tokens,) = tokens_of(make_config(grain_train_files=data, tokenizer_path=str(folder), **ROWS))
    assert tokens[0] == 1
    assert tokens[-1] == 2
    assert not np.isin(tokens[1:-1], [0, 1, 2, 3, 4]).any()
