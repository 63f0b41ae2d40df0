"""Triton kernels that let a captured decode step take one vector of slots, each beside its torch reference.

Per-slot device state of S slots and one scratch slot (index S, for the padding rows of a bucket):
`block_table` int32 [S + 1, P], `position` int32 [S + 1] (where the next token is written), `carry`
int32 [S + 1] (the token the next step reads). Rings of R entries lie in host memory that the device can
reach: `slot_ring` int32 [R, C], binds and grants (host to device), `token_ring` int32 [R, C] (device to
host); entry `counter % R` belongs to the step in hand, and `counter` int64 [1] lives on the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MIN_BLOCK = 16  # a scan over fewer lanes gains nothing


@triton.jit
def _begin_rows(
    counter, slot_ring, slots, carry, position, ids, positions, indptr, last_page_len,
    rows, ring, capacity, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, BLOCK)
    live = i < rows
    turn = tl.load(counter) % ring
    # .cv: the host rewrites the ring between replays, so no cached line may answer
    slot = tl.load(slot_ring + turn * capacity + i, mask=live, other=0, cache_modifier=".cv")
    place = tl.load(position + slot, mask=live, other=0)
    pages = tl.where(live, place // PAGE + 1, 0)
    tl.store(slots + i, slot, mask=live)
    tl.store(ids + i, tl.load(carry + slot, mask=live, other=0).to(tl.int64), mask=live)
    tl.store(positions + i, place, mask=live)
    tl.store(last_page_len + i, place % PAGE + 1, mask=live)
    tl.store(indptr + i, 0, mask=i == 0)
    tl.store(indptr + 1 + i, tl.cumsum(pages, 0), mask=live)


def begin_rows(
    counter: Tensor,
    slot_ring: Tensor,
    slots: Tensor,
    carry: Tensor,
    position: Tensor,
    ids: Tensor,
    positions: Tensor,
    indptr: Tensor,
    last_page_len: Tensor,
    page_size: int,
) -> None:
    """Read this step's slots and gather what its rows need by them.

    Writes slots int32 [B], ids int64 [B] (the carry), positions int32 [B], indptr int32 [B + 1] (pages
    up to and including the one that takes the new token) and last_page_len int32 [B] (with it).
    """
    rows, (ring, capacity) = slots.numel(), slot_ring.shape
    block = max(MIN_BLOCK, triton.next_power_of_2(rows))
    _begin_rows[(1,)](
        counter, slot_ring, slots, carry, position, ids, positions, indptr, last_page_len,
        rows, ring, capacity, PAGE=page_size, BLOCK=block, num_warps=4,
    )  # fmt: skip


def begin_rows_reference(
    counter: Tensor, slot_ring: Tensor, rows: int, carry: Tensor, position: Tensor, page_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(slots, ids, positions, indptr, last_page_len) as begin_rows writes them."""
    slots = slot_ring[int(counter) % len(slot_ring), :rows]
    place = position[slots.long()]
    indptr = torch.zeros(rows + 1, dtype=torch.int32)
    indptr[1:] = torch.cumsum(place // page_size + 1, 0)
    return slots, carry[slots.long()].long(), place, indptr, place % page_size + 1


@triton.jit
def _gather_pages(slots, block_table, width, indptr, indices, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    start = tl.load(indptr + row)
    count = tl.load(indptr + row + 1) - start
    table = block_table + tl.load(slots + row).to(tl.int64) * width
    i = tl.arange(0, BLOCK)
    for first in range(0, count, BLOCK):
        live = first + i < count
        tl.store(indices + start + first + i, tl.load(table + first + i, mask=live), mask=live)


def gather_pages(slots: Tensor, block_table: Tensor, indptr: Tensor, indices: Tensor) -> None:
    """Write the page ids of all rows, row after row, into indices int32 [at least indptr[B]]."""
    _gather_pages[(slots.numel(),)](
        slots, block_table, block_table.shape[1], indptr, indices, BLOCK=256, num_warps=4
    )


def gather_pages_reference(slots: Tensor, block_table: Tensor, indptr: Tensor) -> Tensor:
    """The page ids of all rows, row after row: int32 [indptr[B]]."""
    counts = (indptr[1:] - indptr[:-1]).tolist()
    return torch.cat([block_table[slot, :n] for slot, n in zip(slots.tolist(), counts, strict=True)])


@triton.jit
def _norm_rope_store(
    qkv, query, cache, q_norm, k_norm, cos, sin, positions, indptr, indices, eps,
    PAGE: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    head = tl.program_id(1)
    HALF: tl.constexpr = D // 2
    i = tl.arange(0, HALF)
    source = qkv + (row * (HQ + 2 * HK) + head) * D
    low = tl.load(source + i).to(tl.float32)
    high = tl.load(source + HALF + i).to(tl.float32)
    place = tl.load(positions + row)
    page = tl.load(indices + tl.load(indptr + row + 1) - 1).to(tl.int64)
    if head < HQ + HK:
        scale = tl.rsqrt((tl.sum(low * low, 0) + tl.sum(high * high, 0)) / D + eps)
        if head < HQ:
            weight = q_norm
            target = query + (row * HQ + head) * D
        else:
            weight = k_norm
            target = cache + ((page * 2) * PAGE + place % PAGE) * HK * D + (head - HQ) * D
        low = low * scale * tl.load(weight + i).to(tl.float32)
        high = high * scale * tl.load(weight + HALF + i).to(tl.float32)
        c = tl.load(cos + place * HALF + i)
        s = tl.load(sin + place * HALF + i)
        tl.store(target + i, (low * c - high * s).to(target.dtype.element_ty))
        tl.store(target + HALF + i, (high * c + low * s).to(target.dtype.element_ty))
    else:
        target = cache + ((page * 2 + 1) * PAGE + place % PAGE) * HK * D + (head - HQ - HK) * D
        tl.store(target + i, low.to(target.dtype.element_ty))
        tl.store(target + HALF + i, high.to(target.dtype.element_ty))


def norm_rope_store(
    qkv: Tensor,
    query: Tensor,
    cache: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    indptr: Tensor,
    indices: Tensor,
    eps: float,
) -> None:
    """RMS-normalize and rotate q and k of one new token a row; write k and v into the row's last page.

    qkv [B, (HQ + 2 HK) D]; query [B, HQ, D] out; cache [pages, 2, page, HK, D]; cos and sin float32
    [positions, D / 2], halves rotated against each other as in Qwen3.
    """
    rows, query_heads, head_dim = query.shape
    page_size, kv_heads = cache.shape[2], cache.shape[3]
    _norm_rope_store[(rows, query_heads + 2 * kv_heads)](
        qkv, query, cache, q_norm, k_norm, cos, sin, positions, indptr, indices, eps,
        PAGE=page_size, HQ=query_heads, HK=kv_heads, D=head_dim, num_warps=1,
    )  # fmt: skip


def norm_rope_reference(
    heads: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, eps: float
) -> Tensor:
    """float32 [T, H, D]: heads [T, H, D] normalized over D, then rotated by positions [T]."""
    normed = torch.nn.functional.rms_norm(heads.float(), heads.shape[-1:], weight.float(), eps)
    low, high = normed.chunk(2, -1)
    c, s = cos[positions.long()][:, None], sin[positions.long()][:, None]
    return torch.cat([low * c - high * s, high * c + low * s], -1)


@triton.jit
def _publish(
    tokens, slots, scratch, carry, position, counter, token_ring, word,
    rows, ring, capacity, SYSTEM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, BLOCK)
    live = i < rows
    done = tl.load(counter)
    token = tl.load(tokens + i, mask=live, other=0).to(tl.int32)
    slot = tl.load(slots + i, mask=live, other=0)
    owned = live & (slot != scratch)
    place = tl.load(position + slot, mask=owned, other=0)
    tl.store(carry + slot, token, mask=owned)
    tl.store(position + slot, place + 1, mask=owned)
    tl.store(token_ring + (done % ring) * capacity + i, token, mask=live)
    tl.debug_barrier()
    tl.store(counter, done + 1)
    if SYSTEM:
        # release at system scope: the host must not see the word before the tokens of all threads
        tl.inline_asm_elementwise(
            "st.release.sys.global.b64 [$1], $2; mov.b32 $0, 0;",
            "=r,l,l", [word, done + 1], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(word, done + 1)


def publish(
    tokens: Tensor,
    slots: Tensor,
    scratch: int,
    carry: Tensor,
    position: Tensor,
    counter: Tensor,
    token_ring: Tensor,
    word: Tensor,
) -> None:
    """Land a step: carry and position by slot, tokens into the ring, then word = steps done.

    The scratch slot is left alone, so padding rows never grow.
    """
    rows, (ring, capacity) = slots.numel(), token_ring.shape
    _publish[(1,)](
        tokens, slots, scratch, carry, position, counter, token_ring, word, rows, ring, capacity,
        SYSTEM=carry.is_cuda, BLOCK=max(MIN_BLOCK, triton.next_power_of_2(rows)), num_warps=4,
    )  # fmt: skip


def publish_reference(
    tokens: Tensor, slots: Tensor, scratch: int, carry: Tensor, position: Tensor
) -> tuple[Tensor, Tensor]:
    """(carry, position) after the step, as new tensors."""
    carry, position = carry.clone(), position.clone()
    for token, slot in zip(tokens.tolist(), slots.tolist(), strict=True):
        if slot != scratch:
            carry[slot] = token
            position[slot] += 1
    return carry, position


@triton.jit
def _bind(
    counter, counts, binds, grants, carry, position, block_table,
    ring, bind_capacity, grant_capacity, width, BLOCK: tl.constexpr,
):  # fmt: skip
    turn = tl.load(counter) % ring
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    stride = tl.num_programs(0) * BLOCK
    n_binds = tl.load(counts + turn * 2, cache_modifier=".cv")
    for first in range(0, n_binds, stride):
        live = first + lane < n_binds
        entry = binds + (turn * bind_capacity + first + lane) * 3
        slot = tl.load(entry, mask=live, other=0, cache_modifier=".cv")
        tl.store(position + slot, tl.load(entry + 1, mask=live, cache_modifier=".cv"), mask=live)
        tl.store(carry + slot, tl.load(entry + 2, mask=live, cache_modifier=".cv"), mask=live)
    n_grants = tl.load(counts + turn * 2 + 1, cache_modifier=".cv")
    for first in range(0, n_grants, stride):
        live = first + lane < n_grants
        entry = grants + (turn * grant_capacity + first + lane) * 3
        slot = tl.load(entry, mask=live, other=0, cache_modifier=".cv").to(tl.int64)
        index = tl.load(entry + 1, mask=live, other=0, cache_modifier=".cv")
        page = tl.load(entry + 2, mask=live, cache_modifier=".cv")
        tl.store(block_table + slot * width + index, page, mask=live)


def bind(
    counter: Tensor,
    counts: Tensor,
    binds: Tensor,
    grants: Tensor,
    carry: Tensor,
    position: Tensor,
    block_table: Tensor,
) -> None:
    """Apply this step's ring entries: counts int32 [R, 2] rows of binds and of grants.

    binds int32 [R, *, 3] are (slot, position, carry), grants int32 [R, *, 3] are (slot, index, page); no
    two entries of one step may name the same element.
    """
    _bind[(8,)](
        counter, counts, binds, grants, carry, position, block_table,
        counts.shape[0], binds.shape[1], grants.shape[1], block_table.shape[1], BLOCK=128, num_warps=4,
    )  # fmt: skip


def paged_attention_reference(
    query: Tensor, cache: Tensor, indptr: Tensor, indices: Tensor, last_page_len: Tensor
) -> Tensor:
    """float32 [B, HQ, D] from exactly the page tables that a paged decode kernel is given."""
    rows, query_heads, head_dim = query.shape
    page_size, kv_heads = cache.shape[2], cache.shape[3]
    out = torch.empty(rows, query_heads, head_dim)
    for row in range(rows):
        pages = indices[int(indptr[row]) : int(indptr[row + 1])].long()
        length = (len(pages) - 1) * page_size + int(last_page_len[row])
        keys, values = (
            cache[pages, part].reshape(-1, kv_heads, head_dim)[:length].float()
            .repeat_interleave(query_heads // kv_heads, 1)
            for part in (0, 1)
        )  # fmt: skip
        scores = torch.einsum("hd,thd->ht", query[row].float(), keys) / head_dim**0.5
        out[row] = torch.einsum("ht,thd->hd", scores.softmax(-1), values)
    return out
