"""Definitions hold for any grouping of tokens into chunks: time per token is not time per chunk."""

import pytest

from soloist.bench.figures import RequestFigures, spread, summarise
from soloist.errors import UsageError


def figures(**changed) -> RequestFigures:
    fields = {
        "prompt_tokens": 100,
        "cached_tokens": 0,
        "completion_tokens": 28,
        "ttft_s": 0.5,
        "e2e_s": 0.5 + 27 * 0.0034,
        "chunk_gaps_s": (0.0087,) * 10,
        "forwards": 11,
        "drafted": 33,
        "accepted": 17,
    }
    return RequestFigures(**(fields | changed))


def test_time_per_token_counts_tokens_and_gaps_count_chunks():
    # 2.7 tokens per chunk: 8.7 ms between chunks are 3.4 ms per token.
    summary = summarise([[figures()]])
    assert summary.tpot_ms.mean == pytest.approx(3.4)
    assert summary.chunk_gap_ms.median == pytest.approx(8.7)
    assert summary.decode_tok_per_s == pytest.approx(1000 / 3.4)
    assert summary.acceptance_length == pytest.approx(28 / 11)
    assert summary.acceptance_rate == pytest.approx(17 / 33)
    assert summary.mean_width == pytest.approx(4.0)


def test_an_answer_of_one_token_has_no_time_per_token():
    short = figures(completion_tokens=1, ttft_s=0.7, e2e_s=0.7, chunk_gaps_s=())
    assert short.tpot_ms is None
    # Beside others it counts for what it has.
    summary, alone = summarise([[figures(), short]]), summarise([[figures()]])
    assert summary.num_short == 1 and summary.num_requests == 2 and summary.ttft_ms == pytest.approx(600.0)
    assert summary.tpot_ms == alone.tpot_ms and summary.decode_tok_per_s == alone.decode_tok_per_s
    with pytest.raises(UsageError, match="a time per token needs two"):
        summarise([[short, short]])


def test_repeats_show_their_spread():
    slow, fast = figures(e2e_s=0.5 + 27 * 0.005), figures(e2e_s=0.5 + 27 * 0.002)
    summary = summarise([[slow], [fast], [figures()]])
    assert summary.decode_tok_per_s_range == pytest.approx((200.0, 500.0))
    assert summary.tpot_ms.median == pytest.approx(3.4)
    assert summary.tpot_ms.p10 < 2.5 and summary.tpot_ms.p90 > 4.5
    assert summary.num_requests == 3


def test_output_rate_contains_the_prompt_and_decode_rate_does_not():
    summary = summarise([[figures(ttft_s=1.0, e2e_s=2.0, completion_tokens=11)]])
    assert summary.decode_tok_per_s == pytest.approx(10.0)
    assert summary.output_tok_per_s == pytest.approx(5.5)
    # 5,000 tokens: one behind the wait, the others at 0.1 s each.
    assert summary.felt_s == pytest.approx(1.0 + 4999 * 0.1)


def test_a_server_that_says_nothing_of_its_steps_has_no_acceptance():
    summary = summarise([[figures(forwards=None, drafted=None, accepted=None)], [figures()]])
    assert summary.acceptance_length is None and summary.acceptance_rate is None and summary.mean_width is None


def test_plain_decoding_has_a_length_of_one_and_no_rate():
    summary = summarise([[figures(forwards=28, drafted=0, accepted=0)]])
    assert summary.acceptance_length == 1.0 and summary.acceptance_rate is None and summary.mean_width == 1.0


def test_a_prompt_from_a_cache_makes_a_run_warm():
    assert summarise([[figures(cached_tokens=None)]]).cached_share == 0
    assert summarise([[figures()], [figures(cached_tokens=64)]]).cached_share == pytest.approx(0.32)


def test_tenths_are_interpolated():
    values = spread([float(i) for i in range(11)])
    assert (values.p10, values.median, values.p90, values.mean) == (1.0, 5.0, 9.0, 5.0)
    assert spread([2.0]).p90 == 2.0
