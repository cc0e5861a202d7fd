"""What is said before a run starts."""

from pathlib import Path

from soloist.train.plan import bytes_ratio, in_words, make_plan
from tests.train.small import load_target, make_settings, make_texts


def test_a_plan_counts_parameters_passes_and_bytes(tmp_path: Path):
    target = load_target(tmp_path)
    texts, settings = make_texts(target, 12), make_settings(num_steps=110)
    plan = make_plan(target, texts, settings, target.config.vocab_size, stored_bytes=5_000_000_000, num_ranks=2)
    # One text of twelve is held out.
    assert plan.epochs == 110 * 4 / 11
    assert plan.num_tokens == sum(len(text.token_ids) for text in texts)
    assert plan.train_s > 0 and plan.disk_bytes > 12 * plan.num_parameters > 0
    words = plan.describe()
    assert (
        "read 40.0 times" in words and "in 110 steps" in words and "disk 5.00 GB" in words and "what to expect" in words
    )


def test_steps_are_chosen_by_the_time_they_take(tmp_path: Path):
    target = load_target(tmp_path)
    texts, settings = make_texts(target, 12), make_settings(num_steps=110)
    plan = make_plan(target, texts, settings, target.config.vocab_size, stored_bytes=0, seconds=60)
    assert plan.num_steps > 60 and 50 < plan.train_s <= 60
    assert make_plan(target, texts, settings, target.config.vocab_size, stored_bytes=0, seconds=1e-6).num_steps == 1


def test_a_draft_reads_less_than_it_saves(tmp_path: Path):
    target = load_target(tmp_path)
    config = make_settings().shape.config_for(target.config)
    assert 0.1 < bytes_ratio(target, config) < 1


def test_times_are_told_in_their_unit():
    assert [in_words(s) for s in (59.6, 600, 9000)] == ["60 s", "10 min", "2.5 h"]
