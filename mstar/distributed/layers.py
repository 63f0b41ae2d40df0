"""Linear and embedding layers cut over ranks; each reads its own slice of a checkpoint tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from mstar.distributed.matmul import Layout, Multiply, lay_out
from mstar.distributed.shard import Shard

__all__ = [
    "ColumnLinear",
    "Loadable",
    "Part",
    "RowLinear",
    "TensorSource",
    "VocabEmbedding",
    "WrongShape",
    "check_shape",
]


class WrongShape(Exception):
    """A checkpoint tensor has another shape than the layer it belongs to."""


class TensorSource(Protocol):
    """A tensor that can be read in slices without reading it whole."""

    name: str
    shape: tuple[int, ...]

    def read(self, *slices: slice) -> Tensor: ...


class Loadable(Protocol):
    """A layer that takes checkpoint tensors; `part` names a matrix stacked in it, `kind` is weight or
    bias."""

    def load(self, part: str, kind: str, source: TensorSource) -> None: ...


class Part(NamedTuple):
    """One matrix of a stacked ColumnLinear: its rows in the checkpoint, and those of this rank."""

    size: int
    rows: range

    @classmethod
    def even(cls, size: int, shard: Shard, what: str) -> Part:
        """`size` rows split evenly."""
        return cls(size, shard.span(size, what))

    @classmethod
    def heads(cls, heads: int, head_dim: int, shard: Shard, what: str) -> Part:
        """Whole heads of `head_dim` rows, replicated where there are more ranks than heads."""
        span = shard.replicated_span(heads, what)
        return cls(heads * head_dim, range(span.start * head_dim, span.stop * head_dim))


class _Linear(nn.Module):
    weight: Tensor
    bias: Tensor | None

    def __init__(self, out_features: int, in_features: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None
        self._multiply: Multiply | None = None

    def lay_out(self, layout: Layout) -> None:
        """Give the loaded weight the layout; the plain copy is dropped where nothing reads it any more."""
        laid = lay_out(self.weight.detach(), None if self.bias is None else self.bias.detach(), layout)
        self._multiply = laid.multiply
        if not laid.reads_plain:
            self.weight = nn.Parameter(self.weight.new_empty(0), requires_grad=False)

    def multiply(self, x: Tensor) -> Tensor:
        if self._multiply is not None:
            return self._multiply(x)
        return functional.linear(x, self.weight, self.bias)


class ColumnLinear(_Linear):
    """y = x W^T + b with W's rows split over ranks: x [T, in] whole, y [T, this rank's rows].

    Several matrices with the same input are stacked in one (`parts`, in this order): one multiplication for
    queries, keys and values, say.
    """

    def __init__(self, in_features: int, parts: Mapping[str, Part], *, bias: bool = False) -> None:
        super().__init__(sum(len(part.rows) for part in parts.values()), in_features, bias)
        self._in_features = in_features
        self._places: dict[str, tuple[Part, slice]] = {}
        at = 0
        for name, part in parts.items():
            self._places[name] = (part, slice(at, at + len(part.rows)))
            at += len(part.rows)

    def load(self, part: str, kind: str, source: TensorSource) -> None:
        """Read this rank's rows of matrix `part`; WrongShape where the checkpoint's differs."""
        place, own = self._places[part]
        rows = slice(place.rows.start, place.rows.stop)
        if kind == "bias":
            check_shape(source, (place.size,))
            target = self.bias
            if target is not None:
                target[own] = source.read(rows)
            return
        check_shape(source, (place.size, self._in_features))
        self.weight[own] = source.read(rows)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, this rank's rows]."""
        return self.multiply(x)


class RowLinear(_Linear):
    """y = x W^T + b with W's columns split over ranks: x [T, this rank's columns], y [T, out] a partial sum.

    The sum over ranks is the caller's collective; the bias is held by rank 0 alone, so that it is added once.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        shard: Shard,
        *,
        columns: range | None = None,
        bias: bool = False,
    ) -> None:
        self._columns = columns if columns is not None else shard.span(in_features, "in_features")
        self._whole = (out_features, in_features)
        super().__init__(out_features, len(self._columns), bias and shard.rank == 0)

    def load(self, part: str, kind: str, source: TensorSource) -> None:
        """Read this rank's columns; WrongShape where the checkpoint's differs."""
        if kind == "bias":
            check_shape(source, self._whole[:1])
            if self.bias is not None:
                self.bias.copy_(source.read(slice(None)))
            return
        check_shape(source, self._whole)
        self.weight.copy_(source.read(slice(None), slice(self._columns.start, self._columns.stop)))

    def forward(self, x: Tensor) -> Tensor:
        """x [T, this rank's columns] -> [T, out], to be summed over ranks."""
        return self.multiply(x)


class VocabEmbedding(_Linear):
    """An embedding matrix with its rows (tokens) split over ranks, and the output projection where it is
    tied.

    The last rank's rows are padded with zeros where `vocab_size` does not divide.
    """

    def __init__(self, vocab_size: int, hidden_size: int, shard: Shard) -> None:
        span = shard.padded_span(vocab_size)
        super().__init__(len(span), hidden_size, bias=False)
        self._span = span
        self._whole = (vocab_size, hidden_size)
        self._world = shard.world

    def load(self, part: str, kind: str, source: TensorSource) -> None:
        """Read this rank's rows; WrongShape where the checkpoint's differs."""
        check_shape(source, self._whole)
        start, stop = self._span.start, min(self._span.stop, self._whole[0])
        count = max(stop - start, 0)
        if count:
            self.weight[:count] = source.read(slice(start, stop))
        self.weight[count:] = 0

    def lay_out(self, layout: Layout) -> None:
        """As for a linear layer, but the plain rows stay: tokens are looked up in them."""
        self._multiply = lay_out(self.weight.detach(), None, layout).multiply

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens int64 [T] -> [T, hidden]; a token of another rank gives zeros, to be summed over ranks."""
        if self._world == 1:
            return self.weight.index_select(0, tokens)
        local = tokens - self._span.start
        held = (local >= 0) & (local < len(self._span))
        return self.weight.index_select(0, local.where(held, 0)) * held[:, None]

    def project(self, x: Tensor) -> Tensor:
        """x [R, hidden] -> logits [R, this rank's rows], as many on every rank: those of padding are zeros.

        Gathered in rank order they are the vocabulary's logits, and the padding comes last.
        """
        return self.multiply(x)


def check_shape(source: TensorSource, wanted: Sequence[int]) -> None:
    if tuple(source.shape) != tuple(wanted):
        raise WrongShape(
            f"{source.name} has the shape {list(source.shape)}; the model's config needs {list(wanted)}."
        )
