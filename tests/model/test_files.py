"""From a model's name to its directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from mstar.model.cache import cache_directory, entry
from mstar.model.errors import BadModelFiles, ModelNotFound
from mstar.model.files import resolve
from tests.helpers.tiny_model import write_tiny_model
from tests.model.ggufs import write_gguf


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MSTAR_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def model(own_cache: Path) -> Path:
    return write_tiny_model(own_cache / "my-model")


def test_a_directory_is_taken_as_it_is_and_named_without_its_path(model: Path) -> None:
    files = resolve(str(model))
    assert files.directory == model
    assert files.name == "my-model"


def test_a_gguf_file_is_converted_once(model: Path, own_cache: Path) -> None:
    path = write_gguf(model, own_cache / "tiny.gguf")
    stages: list[str] = []
    files = resolve(str(path), progress=lambda stage, done, total: stages.append(stage))
    assert files.name == "tiny"
    assert "converting" in stages
    stages.clear()
    assert resolve(str(path), progress=lambda stage, done, total: stages.append(stage)) == files
    assert not stages


def test_a_gguf_file_that_changed_is_converted_anew(model: Path, own_cache: Path) -> None:
    path = write_gguf(model, own_cache / "tiny.gguf")
    before = resolve(str(path)).directory
    write_gguf(write_tiny_model(own_cache / "wider", ffn=160), path)
    assert resolve(str(path)).directory != before


def test_a_broken_gguf_file_leaves_no_cache_entry(model: Path, own_cache: Path) -> None:
    path = write_gguf(model, own_cache / "tiny.gguf")
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(BadModelFiles, match="cut short"):
        resolve(str(path))
    kept = [p for p in entry("x").parent.iterdir() if not p.name.startswith(".lock")]
    assert kept == []


def hub(root: Path, model: Path) -> None:
    """Lay `model` out as the hub's library caches owner/name."""
    repo = root / "models--owner--name"
    snapshot = repo / "snapshots" / "abc123"
    snapshot.parent.mkdir(parents=True)
    model.rename(snapshot)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc123")


def test_a_hub_id_is_found_in_the_hubs_cache_when_offline(
    model: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub(own_cache / "hub", model)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(own_cache / "hub"))
    files = resolve("owner/name", offline=True)
    assert files.name == "owner/name"
    assert (files.directory / "config.json").exists()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelNotFound, match=r"owner/other.*HF_HUB_OFFLINE"):
        resolve("owner/other")


def test_offline_a_registry_name_must_be_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelNotFound, match="not in the model cache"):
        resolve("smollm2-135m-instruct", offline=True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelNotFound, match="not in the model cache"):
        resolve("smollm2-135m-instruct")


@pytest.mark.parametrize(
    "name", ["no-such-model", "./missing", "/missing/model", "a/b/c", "", "missing.gguf", "x/y.gguf"]
)
def test_an_unknown_name_is_refused_with_what_is_allowed(name: str) -> None:
    with pytest.raises(
        ModelNotFound, match=r"registry name \(smollm2-135m-instruct\).*GGUF file, or a hub id"
    ):
        resolve(name)


@pytest.mark.parametrize("name", ["a" * 5000, "~nobody-of-this-name/model"])
def test_a_name_that_no_path_can_have_is_refused(name: str) -> None:
    with pytest.raises(ModelNotFound) as caught:
        resolve(name)
    assert len(str(caught.value)) < 400


def test_another_file_is_not_a_model(own_cache: Path) -> None:
    (own_cache / "notes.txt").write_text("hello")
    with pytest.raises(ModelNotFound, match=r"notes\.txt is a file"):
        resolve(str(own_cache / "notes.txt"))


def test_a_directory_without_a_config_points_at_the_gguf_file_inside(own_cache: Path) -> None:
    (own_cache / "folder").mkdir()
    (own_cache / "folder" / "m.gguf").touch()
    with pytest.raises(BadModelFiles, match=r"no config\.json.*m\.gguf"):
        resolve(str(own_cache / "folder"))


def test_pickled_weights_are_never_loaded(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(BadModelFiles, match=r"pytorch_model\.bin is a pickle"):
        resolve(str(model))


def test_a_tokenizer_is_needed(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    with pytest.raises(BadModelFiles, match=r"no tokenizer\.json"):
        resolve(str(model))


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MSTAR_CACHE", "/a/b")
    assert cache_directory() == Path("/a/b")
    monkeypatch.delenv("MSTAR_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert cache_directory() == Path("/c/mstar")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/x")
    assert cache_directory() == Path("/home/x/.cache/mstar")
