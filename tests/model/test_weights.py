"""Reading weights: whole, in slices, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from threading import Barrier, Thread

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor

from mstar.distributed.matmul import Layout
from mstar.distributed.shard import Shard, UnevenShard
from mstar.model.api import KVCache
from mstar.model.errors import BadModelFiles, UnsupportedModel
from mstar.model.files import ModelFiles
from mstar.model.weights import load_model
from tests.helpers.tiny_model import write_tiny_model
from tests.model.runs import Paged

CPU = torch.device("cpu")
Tensors = dict[str, np.ndarray]


def load(directory: Path, **options: object) -> torch.nn.Module:
    return load_model(ModelFiles("m", directory), dtype=torch.float32, device=CPU, **options)  # type: ignore[arg-type]


def rewrite(directory: Path, change: Callable[[Tensors], None]) -> Path:
    path = directory / "model.safetensors"
    tensors = {name: value.copy() for name, value in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)
    return directory


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "tiny", tied=False)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_the_slices_of_all_ranks_make_up_the_checkpoint(tmp_path: Path, family: str, world: int) -> None:
    directory = write_tiny_model(tmp_path / "tiny", family=family, tied=False)
    whole = load_file(directory / "model.safetensors")
    ranks = [
        dict(load(directory, shard=Shard(r, world), layout=Layout.PLAIN).named_parameters())
        for r in range(world)
    ]
    heads, kv_heads, dim = 4, 2, 16

    def part(kind: str, rank: int, at: int, rows: int) -> np.ndarray:
        return ranks[rank][f"layers.1.attention.qkv.{kind}"][at : at + rows].numpy()

    for kind in ("weight", "bias") if family == "qwen2" else ("weight",):
        queries = np.concatenate([part(kind, r, 0, heads * dim // world) for r in range(world)])
        assert np.array_equal(queries, whole[f"model.layers.1.self_attn.q_proj.{kind}"])
        # Fewer key heads than ranks: neighbours hold the same one.
        own, copies = max(kv_heads // world, 1) * dim, max(world // kv_heads, 1)
        at = heads * dim // world
        for number, name in enumerate(("k_proj", "v_proj")):
            parts = [part(kind, r, at + number * own, own) for r in range(0, world, copies)]
            assert np.array_equal(np.concatenate(parts), whole[f"model.layers.1.self_attn.{name}.{kind}"])
    for ours, theirs in (("attention.out", "self_attn.o_proj"), ("mlp.down", "mlp.down_proj")):
        columns = np.concatenate([r[f"layers.0.{ours}.weight"].numpy() for r in ranks], axis=1)
        assert np.array_equal(columns, whole[f"model.layers.0.{theirs}.weight"])
    for ours, theirs in (("embedding", "model.embed_tokens"), ("head", "lm_head")):
        rows = np.concatenate([r[f"{ours}.weight"].numpy() for r in ranks])
        vocab = whole[f"{theirs}.weight"].shape[0]
        assert np.array_equal(rows[:vocab], whole[f"{theirs}.weight"])
        assert not rows[vocab:].any()


class _Threads:
    """A group of threads that add and join tensors in turn."""

    def __init__(self, shard: Shard, barrier: Barrier, board: list[Tensor]) -> None:
        self.shard, self._barrier, self._board = shard, barrier, board

    def _exchange(self, x: Tensor) -> list[Tensor]:
        self._board[self.shard.rank] = x.clone()
        self._barrier.wait(10)
        every = list(self._board)
        self._barrier.wait(10)
        return every

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self._exchange(x)).sum(0)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._exchange(x), dim=-1)


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_with_collectives_give_the_logits_of_one(tiny: Path, world: int) -> None:
    tokens = list(range(3, 40))
    whole = Paged(load(tiny), 1).step([(0, tokens)])  # type: ignore[arg-type]
    barrier, board = Barrier(world), [torch.empty(0)] * world
    results: dict[int, Tensor] = {}

    def rank(number: int) -> None:
        shard = Shard(number, world)
        model = load(tiny, shard=shard, group=_Threads(shard, barrier, board))
        run = Paged(model, 1, shard=shard)  # type: ignore[arg-type]
        results[number] = run.step([(0, tokens)])

    threads = [Thread(target=rank, args=(number,)) for number in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(15)
    for number in range(world):
        torch.testing.assert_close(results[number], whole, atol=1e-4, rtol=0)


def test_ranks_that_do_not_divide_the_model_are_refused(tiny: Path) -> None:
    with pytest.raises(UnevenShard, match=r"num_attention_heads 4 does not divide over 3 ranks"):
        load(tiny, shard=Shard(0, 3))


def test_the_cache_of_a_rank_holds_its_heads_and_its_size_is_told(tiny: Path) -> None:
    spec = load(tiny).spec
    kv = KVCache.allocate(spec, 3, 16, torch.bfloat16, CPU, shard=Shard(1, 2))  # type: ignore[arg-type]
    assert kv.keys[0].shape == (1, 48, 16)
    stored = sum(t.numel() * t.element_size() for t in (*kv.keys, *kv.values))
    assert stored == 3 * KVCache.nbytes_per_page(spec, 16, torch.bfloat16, shard=Shard(1, 2))  # type: ignore[arg-type]
    assert not any(t.any() for t in kv.keys)


def test_missing_tensors_are_named(tiny: Path) -> None:
    rewrite(tiny, lambda tensors: tensors.__delitem__("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(BadModelFiles, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        load(tiny)


def test_unexpected_tensors_are_named_and_computed_buffers_are_not(tiny: Path) -> None:
    buffer = np.ones(8, np.float32)
    rewrite(tiny, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": buffer}))
    load(tiny)
    rewrite(tiny, lambda tensors: tensors.update({"model.layers.0.self_attn.sinks": buffer}))
    with pytest.raises(
        BadModelFiles, match=r"has model\.layers\.0\.self_attn\.sinks, which llama does not use"
    ):
        load(tiny)


def test_a_misshapen_tensor_is_named_with_both_shapes(tiny: Path) -> None:
    rewrite(tiny, lambda tensors: tensors.update({"model.norm.weight": np.ones(63, np.float32)}))
    with pytest.raises(BadModelFiles, match=r"model\.norm\.weight has the shape \[63\].*needs \[64\]"):
        load(tiny)


def tied(directory: Path, value: bool) -> Path:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": value}))
    return directory


def test_a_tied_config_with_an_output_projection_of_its_own_is_refused(tiny: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"tie_word_embeddings is true.*lm_head\.weight"):
        load(tied(tiny, True))


def test_a_tied_checkpoint_that_repeats_its_embedding_is_accepted(tiny: Path) -> None:
    rewrite(tiny, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()}))
    assert load(tied(tiny, True)).head is None


def test_an_untied_config_without_an_output_projection_is_refused(tiny: Path) -> None:
    rewrite(tiny, lambda tensors: tensors.__delitem__("lm_head.weight"))
    with pytest.raises(UnsupportedModel, match=r"tie_word_embeddings is false.*no lm_head\.weight"):
        load(tiny)


def test_a_tensor_in_two_files_is_refused(tiny: Path) -> None:
    (tiny / "copy.safetensors").write_bytes((tiny / "model.safetensors").read_bytes())
    with pytest.raises(BadModelFiles, match="in more than one"):
        load(tiny)


def test_a_file_that_is_not_safetensors_is_refused(tiny: Path) -> None:
    (tiny / "model.safetensors").write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(BadModelFiles, match=r"model\.safetensors cannot be read as safetensors"):
        load(tiny)
