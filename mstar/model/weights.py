"""Building a model and reading its weights: safetensors only, each rank its own slices."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mstar.distributed.group import ALONE, Group
from mstar.distributed.layers import ColumnLinear, Loadable, RowLinear, VocabEmbedding, WrongShape
from mstar.distributed.matmul import Layout
from mstar.distributed.memory import keep_freed_memory
from mstar.distributed.shard import WHOLE, Shard
from mstar.model.api import CausalLM
from mstar.model.choose import choose_layout
from mstar.model.errors import BadModelFiles, UnsupportedModel
from mstar.model.families.family import Family
from mstar.model.families.llama import LLAMA_LINE
from mstar.model.files import ModelFiles
from mstar.model.spec import ModelSpec, read_spec

__all__ = ["FAMILIES", "load_model"]

FAMILIES: dict[str, Family] = dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), LLAMA_LINE)
_NAMED = 5


def load_model(
    files: ModelFiles,
    *,
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard = WHOLE,
    group: Group | None = None,
    layout: Layout | None = None,
) -> CausalLM:
    """The model in `files` with this rank's weights in `dtype` on `device`, ready to run.

    `group` carries the collectives of more than one rank; with `shard` alone the slices are loaded, but a
    forward of a partial model gives partial sums. `layout` None takes the one for the device and dtype.
    Raises UnsupportedModel, BadModelFiles (missing, unexpected or misshapen tensors, tied and untied mixed
    up, each by name), UnevenShard.
    """
    if device.type == "cpu":
        keep_freed_memory()
    spec = read_spec(files.directory)
    family = FAMILIES[spec.family]
    members = group or (ALONE if shard == WHOLE else _Partial(shard))
    with torch.device("meta"):
        model = family.build(spec, members, dtype)
    model = model.to(dtype).to_empty(device=device).eval()
    with contextlib.ExitStack() as stack, torch.inference_mode():
        sources = _open(stack, files.directory)
        _match(spec, family, sources, files.directory)
        modules = dict(model.named_modules())
        for name, target in family.targets(spec).items():
            layer = cast(Loadable, modules[target.module])
            try:
                layer.load(target.part, target.kind, sources[name])
            except (WrongShape, SafetensorError) as error:
                raise BadModelFiles(f"{files.directory}: {error}") from error
        chosen = layout or (choose_layout(spec, dtype) if device.type == "cpu" else Layout.PLAIN)
        for module in modules.values():
            if isinstance(module, ColumnLinear | RowLinear | VocabEmbedding):
                module.lay_out(chosen)
    return model


class _Partial:
    """One rank's part on its own: sums stay partial."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x


class _Source:
    """A checkpoint tensor read slice by slice from its mapped file."""

    def __init__(self, name: str, view: Any) -> None:
        self.name = name
        self.shape = tuple(view.get_shape())
        self._view = view

    def read(self, *slices: slice) -> Tensor:
        return cast(Tensor, self._view[slices if len(slices) > 1 else slices[0]])


def _open(stack: contextlib.ExitStack, directory: Path) -> dict[str, _Source]:
    sources: dict[str, _Source] = {}
    for path in sorted(directory.glob("*.safetensors")):
        try:
            file = stack.enter_context(safe_open(path, framework="pt"))
            found = {name: _Source(name, file.get_slice(name)) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise BadModelFiles(f"{path} cannot be read as safetensors: {error}.") from error
        if twice := sources.keys() & found.keys():
            raise BadModelFiles(f"{directory}: tensor {min(twice)} is in more than one *.safetensors file.")
        sources.update(found)
    return sources


def _match(spec: ModelSpec, family: Family, sources: Mapping[str, _Source], directory: Path) -> None:
    wanted = family.targets(spec).keys()
    missing = [name for name in wanted if name not in sources]
    extra = [name for name in sources if name not in wanted and not name.endswith(family.ignored)]
    head = "lm_head.weight"
    if head in missing:
        raise UnsupportedModel(
            f"{directory}: tie_word_embeddings is false, but the checkpoint has no {head}; "
            "set it to true if the embedding is the output projection."
        )
    if spec.tied and head in extra and _same(sources[head], sources["model.embed_tokens.weight"]):
        extra.remove(head)
    if spec.tied and head in extra:
        raise UnsupportedModel(
            f"{directory}: tie_word_embeddings is true, but the checkpoint has its own {head}; "
            "set it to false."
        )
    if missing:
        raise BadModelFiles(f"{directory}: the checkpoint lacks {_some(missing)}.")
    if extra:
        raise BadModelFiles(
            f"{directory}: the checkpoint has {_some(extra)}, which {spec.family} does not use."
        )


def _same(one: _Source, other: _Source) -> bool:
    return one.shape == other.shape and torch.equal(one.read(slice(None)), other.read(slice(None)))


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - _NAMED} more tensors" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + rest
