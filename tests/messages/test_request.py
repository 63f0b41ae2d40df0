"""What a gateway asks of a decider, as records."""

from __future__ import annotations

from mstar.messages.request import Admit, Sampling, control_decoder, encode_control
from shm.slab import SlabHandle

ADMIT = Admit(7, 0, SlabHandle(1, 4096, 12, 3), 3, 5, Sampling(seed=9, choice=4), (2,), 1, count=3)


def test_a_record_comes_back_as_it_was_sent() -> None:
    assert control_decoder.decode(encode_control(ADMIT)) == ADMIT


def test_the_sequences_of_a_prompt_differ_in_their_id_and_choice_alone() -> None:
    found = ADMIT.sequences()
    assert [(one.request, one.sampling.choice, one.count) for one in found] == [
        (7, 4, 1),
        (8, 5, 1),
        (9, 6, 1),
    ]
    rest = {
        (one.prompt.block, one.prompt_tokens, one.max_tokens, one.sampling.seed, one.stop_ids)
        for one in found
    }
    assert rest == {(1, 3, 5, 9, (2,))}
