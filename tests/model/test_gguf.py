"""Reading and converting GGUF files."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from mstar.model.convert import convert_gguf
from mstar.model.errors import BadModelFiles, UnsupportedModel
from mstar.model.gguf import GGUF
from mstar.model.spec import read_spec
from mstar.model.tokenizer import Tokenizer
from tests.helpers.tiny_model import write_tiny_model
from tests.model.ggufs import write_gguf

Kind = gguf.GGMLQuantizationType


def silent(stage: str, done: int, total: int) -> None:
    pass


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "source", tied=False)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_converted_file_holds_the_weights_it_was_made_from(tmp_path: Path, family: str) -> None:
    source, target = write_tiny_model(tmp_path / "source", family=family), tmp_path / "target"
    target.mkdir()
    convert_gguf(write_gguf(source, tmp_path / "m.gguf"), target, silent)
    before, after = load_file(source / "model.safetensors"), load_file(target / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert read_spec(source) == read_spec(target)


@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q8_0, Kind.Q5_0, Kind.BF16, Kind.F16])
def test_quantised_tensors_equal_the_librarys_values(source: Path, tmp_path: Path, kind: Kind) -> None:
    path = write_gguf(source, tmp_path / "m.gguf", kind=kind)
    file, theirs = GGUF(path), gguf.GGUFReader(path)
    for tensor in theirs.tensors:
        dense = file.dense(tensor.name)
        assert dense.dtype == (np.float16 if tensor.tensor_type == Kind.F16 else np.float32)
        assert np.array_equal(dense, gguf.dequantize(tensor.data, tensor.tensor_type))


def test_the_metadata_equals_the_librarys(source: Path, tmp_path: Path) -> None:
    path = write_gguf(source, tmp_path / "m.gguf")
    ours, theirs = GGUF(path).metadata, gguf.GGUFReader(path)
    fields = {name: field for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert ours.keys() == fields.keys()
    for name, field in fields.items():
        value = ours[name]
        assert (value.tolist() if isinstance(value, np.ndarray) else value) == field.contents()


def test_the_tokenizer_and_its_template_come_along(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    convert_gguf(write_gguf(source, tmp_path / "m.gguf"), target, silent)
    before, after = Tokenizer.load(source), Tokenizer.load(target)
    for text in ("hello the world", "<|im_start|>user\nné ☕<|im_end|>"):
        assert (
            after.encode(text, add_special_tokens=True).tolist()
            == before.encode(text, add_special_tokens=True).tolist()
        )
    assert after.chat_template == before.chat_template
    assert (after.eos_ids, after.special_ids) == (before.eos_ids, before.special_ids)


def test_a_bos_token_is_added_where_the_file_says_so(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    convert_gguf(write_gguf(source, tmp_path / "m.gguf", pre="llama-bpe", add_bos=True), target, silent)
    tokenizer = Tokenizer.load(target)
    bos = read_spec(target).bos_token_id
    assert tokenizer.encode("hello", add_special_tokens=True)[0] == bos
    assert tokenizer.encode("hello", add_special_tokens=False)[0] != bos


def test_a_large_file_becomes_several_shards_with_an_index(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mstar.model.convert._SHARD_BYTES", 100_000)
    target = tmp_path / "target"
    target.mkdir()
    convert_gguf(write_gguf(source, tmp_path / "m.gguf"), target, silent)
    index = json.loads((target / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 2
    assert all(name in load_file(target / file) for name, file in index.items())
    assert index.keys() == load_file(source / "model.safetensors").keys()


def test_progress_reaches_the_end(source: Path, tmp_path: Path) -> None:
    target, heard = tmp_path / "target", []
    target.mkdir()
    convert_gguf(write_gguf(source, tmp_path / "m.gguf"), target, lambda *report: heard.append(report))
    assert heard[-1][0] == "converting"
    assert heard[-1][1] == heard[-1][2] > 0


@pytest.mark.parametrize("keep", [10, 23, 100, 2000, -1000])
def test_a_file_cut_short_is_refused(source: Path, tmp_path: Path, keep: int) -> None:
    path, target = write_gguf(source, tmp_path / "m.gguf"), tmp_path / "target"
    target.mkdir()
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(BadModelFiles, match=r"m\.gguf"):
        convert_gguf(path, target, silent)


def test_something_else_is_not_taken_for_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(BadModelFiles, match="not b'GGUF'"):
        GGUF(path)


def test_a_header_that_lies_about_its_counts_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1 << 60) + bytes(64))
    with pytest.raises(BadModelFiles, match="claims"):
        GGUF(path)


def test_an_unknown_version_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0))
    with pytest.raises(UnsupportedModel, match="version 1"):
        GGUF(path)


def test_an_unknown_architecture_is_named_with_those_that_convert(source: Path, tmp_path: Path) -> None:
    path = write_gguf(source, tmp_path / "m.gguf")
    path.write_bytes(
        path.read_bytes().replace(
            b"\x05\x00\x00\x00\x00\x00\x00\x00llama", b"\x05\x00\x00\x00\x00\x00\x00\x00mamba", 1
        )
    )
    with pytest.raises(UnsupportedModel, match=r"'mamba'.*llama"):
        convert_gguf(path, tmp_path, silent)


def test_an_unknown_pre_tokenizer_is_named(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"'tekken'.*smollm"):
        convert_gguf(write_gguf(source, tmp_path / "m.gguf", pre="tekken"), tmp_path, silent)
