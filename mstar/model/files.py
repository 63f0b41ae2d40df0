"""From what a user calls a model to a directory in Hugging Face layout."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import NamedTuple

from mstar.model import registry
from mstar.model.cache import Progress, entry, filling
from mstar.model.convert import convert_gguf
from mstar.model.errors import BadModelFiles, ModelNotFound, PullFailed
from mstar.model.pull import pull

__all__ = ["ModelFiles", "resolve"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
_TRUE = {"1", "true", "yes", "on"}


class ModelFiles(NamedTuple):
    """A model on disk: `name` to show (never a path), `directory` with config.json, tokenizer.json,
    *.safetensors."""

    name: str
    directory: Path


def resolve(model: str, *, offline: bool | None = None, progress: Progress | None = None) -> ModelFiles:
    """Find `model`, fetching or converting it first where needed; blocks meanwhile.

    In this order: a registry name, a local directory, a local GGUF file (converted once into the cache), a
    hub id `owner/name`. `offline` None follows HF_HUB_OFFLINE; offline, only what lies on disk is found.
    Raises ModelNotFound, BadModelFiles, UnsupportedModel or PullFailed, each naming the value and what is
    allowed.
    """
    if offline is None:
        offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in _TRUE
    if model in registry.REGISTRY:
        if offline and not entry(model).is_dir():
            raise ModelNotFound(
                f"{model} is not in the model cache and offline mode is on; unset HF_HUB_OFFLINE."
            )
        return ModelFiles(model, checked(pull(model, progress)))
    try:
        path = Path(model).expanduser()
        is_directory, is_file = bool(model) and path.is_dir(), path.is_file()
    except (OSError, RuntimeError) as error:  # a name too long, a folder that is not ours, ~ of nobody
        why = getattr(error, "strerror", None) or error
        raise ModelNotFound(f"There is no model {_short(model)}: {why}.") from error
    if is_directory:
        return ModelFiles(path.resolve().name, checked(path.resolve()))
    if is_file:
        return _gguf(path.resolve(), progress or (lambda stage, done, total: None))
    if _HUB_ID.fullmatch(model) and path.suffix != ".gguf":
        return ModelFiles(model, checked(_hub(model, offline)))
    raise ModelNotFound(
        f"There is no model {_short(model)}: give a registry name ({', '.join(registry.names())}), "
        "a directory in Hugging Face layout, a GGUF file, or a hub id like owner/name."
    )


def _short(model: str) -> str:
    shown = repr(model)
    return shown if len(shown) <= 200 else f"{shown[:200]}..."


def checked(directory: Path) -> Path:
    """`directory` where it holds what a model needs; BadModelFiles naming the first file that is missing."""
    present = {path.name for path in directory.iterdir()}
    if "config.json" not in present:
        gguf = sorted(name for name in present if name.endswith(".gguf"))
        hint = f" Name the file itself: {directory / gguf[0]}." if gguf else ""
        raise BadModelFiles(f"{directory} has no config.json; a model's directory needs one.{hint}")
    if not any(name.endswith(".safetensors") for name in present):
        pickled = sorted(name for name in present if name.endswith((".bin", ".pt", ".pth")))
        hint = (
            f" {pickled[0]} is a pickle, which is never loaded: convert it to safetensors." if pickled else ""
        )
        raise BadModelFiles(
            f"{directory} has no *.safetensors file; weights are read from that format only.{hint}"
        )
    if "tokenizer.json" not in present:
        raise BadModelFiles(
            f"{directory} has no tokenizer.json; save the tokenizer in that format "
            "(transformers' fast tokenizers write it)."
        )
    return directory


def _gguf(path: Path, progress: Progress) -> ModelFiles:
    if path.suffix != ".gguf":
        raise ModelNotFound(f"{path.name} is a file, but not a .gguf one; give a directory or a GGUF file.")
    status = path.stat()
    identity = f"{path}\0{status.st_size}\0{status.st_mtime_ns}"
    name = f"{path.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    if not entry(name).is_dir():
        try:
            with filling(name, progress) as scratch:
                if scratch is not None:
                    convert_gguf(path, scratch / "model", progress)
        except OSError as error:
            raise PullFailed(f"Converting {path.name} failed: {error}.") from error
    return ModelFiles(path.stem, checked(entry(name)))


def _hub(model: str, offline: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=_HUB_FILES, local_files_only=offline))
    except LocalEntryNotFoundError as error:
        reason = "offline mode is on (HF_HUB_OFFLINE)" if offline else "the hub cannot be reached"
        raise ModelNotFound(f"The hub model {model} is not in the local cache and {reason}.") from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelNotFound(f"The hub model {model} could not be fetched: {first}") from error
