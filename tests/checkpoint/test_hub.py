"""Models by their names on the Hugging Face Hub, from a cache on disk: nothing is downloaded."""

import os
import sys
from pathlib import Path

import pytest

import maxtext
from maxtext.adapters.peft import adapter_folders
from maxtext.checkpoint.open import open_checkpoint
from maxtext.cli.batch import newest_step
from maxtext.cli.generation import resolve_model
from maxtext.cli.main import main
from maxtext.cli.train import open_model_checkpoint
from maxtext.common import hub
from maxtext.common.errors import ConfigError, MissingExtra, UserError
from maxtext.configs.sources import from_overrides
from maxtext.trainers.tune import model_overrides

huggingface_hub = pytest.importorskip("huggingface_hub")
COMMIT, OLD_COMMIT = "a" * 40, "b" * 40


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory):
    """A folder of a tiny model."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("snapshot")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def cache(snapshot, tmp_path, monkeypatch):
    """A cache as huggingface_hub has it: links to blobs, by commit, and commits of branches."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "hub" / "models--org--tiny"
    (repository / "blobs").mkdir(parents=True)
    (repository / "refs").mkdir()
    for branch, commit in (("main", COMMIT), ("v1", OLD_COMMIT)):
        (repository / "refs" / branch).write_text(commit)
        folder = repository / "snapshots" / commit
        folder.mkdir(parents=True)
        for file in snapshot.iterdir():
            blob = repository / "blobs" / f"{commit}-{file.name}"
            blob.write_bytes(file.read_bytes())
            (folder / file.name).symlink_to(os.path.relpath(blob, folder))
    monkeypatch.chdir(tmp_path)
    return repository / "snapshots"


def test_a_name_is_the_folder_of_its_newest_commit(cache):
    assert hub.find_folder("org/tiny") == cache / COMMIT
    assert hub.find_folder("org/tiny@main") == cache / COMMIT
    assert hub.find_folder("org/tiny@v1") == cache / OLD_COMMIT
    assert hub.find_folder(f"org/tiny@{OLD_COMMIT}") == cache / OLD_COMMIT


def test_a_local_folder_of_the_name_wins(cache, tmp_path):
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    assert hub.find_folder("org/tiny") == Path("org/tiny")
    assert hub.find_folder("org/tiny@v1") == cache / OLD_COMMIT


@pytest.mark.parametrize("path", ["tiny", "./org/tiny", "a/b/c", "/org/tiny", "~/tiny", "org/"])
def test_other_paths_are_local(cache, path):
    assert hub.find_folder(path) == Path(path).expanduser()


def test_every_command_that_takes_a_folder_takes_a_name(cache, capsys):
    assert open_checkpoint("org/tiny").path == cache / COMMIT  # convert, train, teachers
    model = resolve_model("org/tiny@v1", None, [])  # decode, chat, serve, eval, bench
    assert model.checkpoint is not None
    assert model.checkpoint.path == cache / OLD_COMMIT
    assert newest_step("org/tiny") == str((cache / COMMIT).resolve())  # batch
    checkpoint = open_model_checkpoint(None, from_overrides(["load_parameters_path=org/tiny"]))
    assert checkpoint is not None
    assert checkpoint.path == cache / COMMIT
    assert model_overrides("org/tiny", {})[0]["load_parameters_path"].value == str(cache / COMMIT)
    assert main(["inspect", "org/tiny"]) == 0
    assert str(cache / COMMIT) in capsys.readouterr().out


def test_a_model_is_loaded_by_its_name(cache):
    llm = maxtext.LLM.load("org/tiny", dtype="float32", attention="dot_product")
    assert llm.logits([1, 2, 3]).shape == (3, 64)


def test_adapters_have_names_on_the_hub(cache, snapshot, tmp_path, capsys):
    """The name of an adapter is the part after the slash. A missing one is an error before the
    model is loaded.
    """
    repository = tmp_path / "hub" / "models--org--sql"
    folder = repository / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    assert adapter_folders("org/sql") == adapter_folders("org/sql@main") == {"sql": folder}
    with pytest.raises(ConfigError, match="neither a PEFT adapter nor a folder of them"):
        adapter_folders("org/tiny")
    for adapters in (["org/sql"], {"name": "org/sql@main"}):
        with pytest.raises(UserError, match=str(folder)):  # the adapter is read, and is empty
            maxtext.LLM.load(snapshot, adapters=adapters)
    assert main(["chat", str(snapshot), "--adapter", "org/none"]) == 2
    message = capsys.readouterr().err
    assert "hf download org/none" in message
    assert str(tmp_path / "hub" / "models--org--none") in message


def test_offline_the_error_says_what_to_copy_where(cache, tmp_path, capsys):
    assert main(["chat", "org/none"]) == 2
    message = capsys.readouterr().err
    assert "there is no folder org/none" in message
    assert "hf download org/none" in message
    assert str(tmp_path / "hub" / "models--org--none") in message
    assert len(message.splitlines()) == 1
    with pytest.raises(ConfigError, match="hf download org/tiny --revision v9"):
        hub.find_folder("org/tiny@v9")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ("RepositoryNotFoundError", "shows no org/x: check the name.*HF_TOKEN"),
        ("GatedRepoError", "gated repository set HF_TOKEN"),
        ("RevisionNotFoundError", "org/x has no revision r"),
    ],
)
def test_refusals_of_the_hub(cache, monkeypatch, error, reason):
    kind = getattr(huggingface_hub.errors, error)

    def download(*args, **options):
        raise kind.__new__(kind)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ConfigError, match=reason):
        hub.find_folder("org/x@r")


def test_folders_are_left_out_except_that_of_chat_templates():
    """By huggingface_hub's own filter of a repository's files."""
    taken = ["config.json", "chat_template.jinja", "additional_chat_templates/tool_use.jinja"]
    left_out = ["original/x.json", "a/x.json", "additional/x.json", "a.gguf", "onnx/a/x.json"]
    left_out += [f"additional_chat_templates{part}/x.jinja" for part in ("2", "/y")]
    files = huggingface_hub.utils.filter_repo_objects(
        [*taken, *left_out],
        allow_patterns=list(hub.MODEL_FILES),
        ignore_patterns=hub.patterns_of_other_folders(hub.CHAT_TEMPLATES_DIR),
    )
    assert list(files) == taken


def test_the_token_is_passed_on_and_never_shown(cache, monkeypatch):
    requests = []

    def download(name, token, **options):
        requests.append((name, options["revision"], token))
        raise OSError(f"refused {token}")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ConfigError, match="failed \\(OSError\\)") as caught:
        resolve_model("org/x", None, ["hf_access_token=secret"])
    assert "secret" not in str(caught.value)
    with pytest.raises(ConfigError):
        hub.find_folder("org/x@main")  # None: the library reads the environment
    assert requests == [("org/x", None, "secret"), ("org/x", "main", None)]


def test_a_missing_package_names_its_extra(cache, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtra, match=r'org/x.*pip install -e .*\[hf\]"'):
        hub.find_folder("org/x")


def test_names_of_models(cache, tmp_path):
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    assert hub.model_name("org/tiny@v1") == "tiny"
    assert hub.model_name("runs/mine/") == "mine"
