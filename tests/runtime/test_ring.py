"""The ring of committed tokens: a record is read once, when it is complete, in order."""

import torch

from soloist.runtime.buffers import FinishCode
from soloist.runtime.ring import TokenRing


def i32(x: int) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.int32)


def publish(ring: TokenRing, tokens: list[int], num: int, drafted=0, accepted=0, code=0, logprobs=None) -> None:
    ring.publish(torch.tensor(tokens), i32(num), i32(drafted), i32(accepted), i32(code), logprobs)


def test_records_come_once_and_in_order():
    ring = TokenRing(num_slots=3, max_width=4, num_tokens=30)
    assert ring.poll() is None
    publish(ring, [7, 8, 9, 9], 3, drafted=3, accepted=2)
    publish(ring, [5], 1, code=FinishCode.STOP)
    first, second = ring.poll(), ring.poll()
    assert (first.token_ids, first.num_drafted, first.num_accepted) == ([7, 8, 9], 3, 2)
    assert first.finish_code is FinishCode.RUNNING and first.logprobs == []
    assert (second.token_ids, second.finish_code) == ([5], FinishCode.STOP)
    assert ring.poll() is None


def test_the_ring_goes_round():
    ring = TokenRing(num_slots=2, max_width=2, num_tokens=30)
    for step in range(7):
        publish(ring, [step, step + 1], 2)
        if step == 0:
            continue
        assert ring.poll().token_ids == [step - 1, step]
    assert ring.poll().token_ids == [6, 7] and ring.poll() is None


def test_a_reset_forgets_what_was_not_read():
    ring = TokenRing(num_slots=2, max_width=1, num_tokens=30)
    publish(ring, [3], 1)
    publish(ring, [4], 1)
    ring.reset()
    assert ring.poll() is None
    publish(ring, [5], 1)
    assert ring.poll().token_ids == [5]


def test_log_probabilities_belong_to_their_tokens():
    ring = TokenRing(num_slots=2, max_width=3, num_tokens=5)
    for step in range(3):
        chosen = torch.tensor([-1.0, -2.0]) - step
        ids = torch.tensor([[0, 1, 2, 3, 4], [4, 3, 2, 1, 0]])
        values = -torch.arange(10.0).view(2, 5) - step
        publish(ring, [2, 3], 2, logprobs=(chosen, ids, values))
        record = ring.poll(num_top=2)
        assert [lp.token_id for lp in record.logprobs] == [2, 3]
        assert [lp.logprob for lp in record.logprobs] == [-1.0 - step, -2.0 - step]
        assert record.logprobs[1].top == ((4, -5.0 - step), (3, -6.0 - step))


def test_tokens_behind_the_committed_ones_have_no_log_probability():
    ring = TokenRing(num_slots=1, max_width=3, num_tokens=30)
    publish(ring, [2, 3, 4], 1, logprobs=(torch.zeros(3), torch.zeros(3, 20).long(), torch.zeros(3, 20)))
    assert len(ring.poll(num_top=0).logprobs) == 1
