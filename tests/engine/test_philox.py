from __future__ import annotations

import numpy as np
import pytest
import torch

from mstar.engine.philox import philox4x32, uniforms

# Known answers published with Random123: counter, key, ten rounds.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_the_published_answers_come_out(counter, key, answer):
    arrays = [np.array([word], dtype=np.int64) for word in (*counter, *key)]
    words = philox4x32(tuple(arrays[:4]), tuple(arrays[4:]))
    assert tuple(int(word[0]) for word in words) == answer


def _keys(rows: int) -> tuple[np.ndarray, ...]:
    draw = np.random.default_rng(7)
    return (
        draw.integers(0, 2**63 - 1, rows, dtype=np.int64),
        draw.integers(0, 128, rows, dtype=np.int64),
        draw.integers(0, 9, rows, dtype=np.int64),
        draw.integers(0, 2**40, rows, dtype=np.int64),
    )


def test_numpy_and_torch_give_the_same_bits():
    keys = _keys(10_000)
    from_numpy = uniforms(*keys)
    from_torch = uniforms(*(torch.from_numpy(column) for column in keys))
    assert from_numpy.dtype == np.float64
    assert from_torch.dtype == torch.float64
    np.testing.assert_array_equal(from_numpy.view(np.int64), from_torch.numpy().view(np.int64))


def test_a_uniform_is_the_first_53_bits_of_its_block():
    # The first two words of the block at counter 0, key 0, by the published answer.
    expected = ((0x6627E8D5 >> 5) * 2**26 + (0xE169C58D >> 6)) / 2**53
    zero = np.zeros(1, dtype=np.int64)
    assert uniforms(zero, zero, zero, zero)[0] == expected


@pytest.mark.parametrize("field", range(4))
def test_every_part_of_the_key_matters(field):
    keys = [np.full(2, 5, dtype=np.int64) for _ in range(4)]
    keys[field] = np.array([5, 6], dtype=np.int64)
    first, second = uniforms(*keys)
    assert first != second


def test_the_high_words_of_seed_and_position_matter():
    here = np.full(3, 5, dtype=np.int64)
    far = np.array([5, 5 + 2**32, 5], dtype=np.int64)
    assert len(set(uniforms(far, here, here, far[::-1].copy()[[0, 0, 1]]).tolist())) == 3


def test_a_row_does_not_depend_on_the_rows_beside_it():
    keys = _keys(64)
    together = uniforms(*keys)
    alone = np.concatenate([uniforms(*(column[row : row + 1] for column in keys)) for row in range(64)])
    np.testing.assert_array_equal(together, alone)


def test_uniforms_over_positions_fill_the_unit_interval_evenly():
    rows = 100_000
    same = np.full(rows, 42, dtype=np.int64)
    drawn = uniforms(same, same, same, np.arange(rows, dtype=np.int64))
    assert drawn.min() >= 0
    assert drawn.max() < 1
    counts = np.bincount((drawn * 100).astype(np.int64), minlength=100)
    statistic = ((counts - rows / 100) ** 2 / (rows / 100)).sum()
    assert 60 < statistic < 149  # chi-square with 99 degrees: 0.1 % on each side
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.011  # 3.3 / sqrt(rows)
