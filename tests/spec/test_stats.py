"""Figures of drafting: per request and over all of them, of the tokens that clients were given."""

import pytest
import torch

from soloist.sampling_params import SamplingParams
from tests.scripted import KnownAnswer, Script, TableModel
from tests.spec.drafters import make_engine


def make_engine_of(widths: list[int]):
    model = TableModel(9, lambda positions, ids: torch.nn.functional.one_hot((ids + 1) % 5, 9) * 9.0)
    answers = {(0,): [i % 5 for i in range(1, 200)]}
    return make_engine(model, KnownAnswer(answers, max_drafts=7, vocab_size=9, widths=widths))


def test_totals_are_sums_over_requests():
    engine = make_engine_of([8, 1, 3])
    want = {"forwards": 0, "drafted": 0, "accepted": 0, "completion_tokens": 0}
    for max_tokens in (1, 20, 33):
        generation = engine.generate([0], SamplingParams(max_tokens=max_tokens))
        list(generation)
        for name in want:
            want[name] += getattr(generation.stats, name)
    totals = engine.totals
    assert {name: getattr(totals, name) for name in want} == want
    assert totals.requests == 3 and totals.completion_tokens == 54
    assert totals.acceptance_length == pytest.approx(54 / want["forwards"])


def test_the_last_step_counts_what_the_client_was_given():
    engine = Script([[1], [2, 3, 4, 5], [6, 7, 8]], vocab_size=9).engine()
    generation = engine.generate([7], SamplingParams(max_tokens=8))
    list(generation)
    assert (generation.stats.accepted, generation.stats.acceptance_length) == (5, pytest.approx(8 / 3))
    # A stop string ended the text with the third token: the second step gave two tokens, both drafts, the third none.
    generation.keep(3)
    stats = generation.stats
    assert (stats.completion_tokens, stats.forwards, stats.acceptance_length) == (3, 3, 1.0)
    assert stats.accepted_histogram == (2, 0, 1, 0) and stats.drafted_histogram == (1, 0, 1, 1)
    assert stats.accepted == 2 == engine.totals.accepted
    assert (engine.totals.requests, engine.totals.completion_tokens) == (1, 3)


def test_a_rate_is_of_drafts_that_were_really_verified():
    # Field report 61: widths of 1 to 8, and a last step that is cut short.
    generation = make_engine_of([8, 2, 5, 1, 7, 3]).generate([0], SamplingParams(max_tokens=30))
    steps = list(generation)
    stats = generation.stats
    # 8 + 2 + 5 + 1 + 7 + 3 tokens, and the last 4 of a step that could have 8.
    assert [len(step.token_ids) for step in steps] == [8, 2, 5, 1, 7, 3, 4]
    assert stats.drafted == 7 + 1 + 4 + 0 + 6 + 2 + 3 == stats.accepted and stats.acceptance_rate == 1
    assert sum(stats.drafted_histogram) == sum(stats.accepted_histogram) == stats.forwards == 7
    assert sum(j * steps for j, steps in enumerate(stats.accepted_histogram)) == stats.accepted
