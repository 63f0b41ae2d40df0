"""What can go wrong between a model's name and its logits."""

from __future__ import annotations

__all__ = [
    "BadModelFiles",
    "ModelError",
    "ModelNotFound",
    "PullFailed",
    "TemplateError",
    "UnsupportedModel",
]


class ModelError(Exception):
    """A model could not be found, read or used as asked."""


class ModelNotFound(ModelError):
    """No registry entry, directory, GGUF file or hub id answers to the name."""


class BadModelFiles(ModelError):
    """The model's files are there, but incomplete, corrupt or contradicting each other."""


class UnsupportedModel(ModelError):
    """The model asks for something that is not implemented here."""


class PullFailed(ModelError):
    """Fetching or converting a model did not come to its end; the cache is as it was before."""


class TemplateError(ModelError):
    """The chat template refused the messages: a mistake of the request, not of the server."""
