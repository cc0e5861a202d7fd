"""The recipes of drafts: prompts of real models, texts of the ablation, and what figures are made of."""

import gzip
import importlib.util
import json
import random
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]


def load(path: str) -> ModuleType:
    """Load a script under a name of its own: recipes call their parts alike."""
    file = ROOT / path
    sys.path.insert(0, str(file.parent))
    try:
        name = "_".join(file.with_suffix("").relative_to(ROOT).parts)
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        # Dataclasses look their module up.
        sys.modules[name] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(file.parent))
    return module


@pytest.fixture(scope="module")
def prompts() -> ModuleType:
    return load("recipes/real_models/prompts.py")


@pytest.fixture(scope="module")
def ablate() -> ModuleType:
    return load("recipes/ablation/ablate.py")


@pytest.fixture(scope="module")
def drafts() -> ModuleType:
    return load("benchmarks/drafts.py")


def test_prompts_are_varied_and_held_out_ones_come_from_other_modules_and_topics(prompts, monkeypatch, tmp_path):
    functions = [
        prompts.Function(
            module=f"module_{i}",
            name=f"f_{i}",
            source=f"def f_{i}(x):\n    '''Add {i}.'''\n" + f"    y = x + {i}\n" * 9 + "    return y",
            head=f"def f_{i}(x):\n    '''Add {i}.'''",
            summary=f"Add {i}.",
        )
        for i in range(60)
    ]
    paragraphs = {f"topic_{i}": [f"Paragraph {i}."] for i in range(60)}
    taken: set[str] = set()
    sides = {}
    for held_out in (True, False):
        writer = prompts.make_writer(functions, paragraphs, held_out=held_out, seed=1)
        sides[held_out] = prompts.draw_prompts(writer, 150, taken)
    assert len({json.dumps(p) for side in sides.values() for p in side}) == 300
    modules = {held_out: {f.name for f in functions if prompts.is_held_out(f.module) is held_out} for held_out in sides}
    assert modules[True] and modules[False]
    for held_out, side in sides.items():
        text = json.dumps(side)
        assert any(f"{name}(" in text or f"`{name}`" in text for name in modules[held_out])
        assert not any(f"{name}(" in text or f"`{name}`" in text for name in modules[not held_out])
        code = sum("prompt" in p or "f_" in json.dumps(p) or " code that " in json.dumps(p) for p in side)
        assert 0.3 < code / len(side) < 0.7


def test_prompts_are_read_from_this_pythons_library(prompts):
    found = {(f.module, f.name): f for f in prompts.read_functions()}
    f = found["textwrap", "dedent"] if ("textwrap", "dedent") in found else next(iter(found.values()))
    assert f.source.startswith("def ") and f.source.startswith(f.head) and len(f.source) > len(f.head)
    assert len(found) > 300 and not any("test" in module.split(".") for module, _ in found)


def test_questions_of_benchmarks_are_read_from_their_files():
    evaluation = load("recipes/real_models/evaluation.py")
    data = gzip.compress(b'{"task_id": "x/0", "prompt": "def f():\\n", "canonical_solution": "    pass"}\n')
    assert evaluation.read_human_eval(data) == [{"prompt": "def f():\n"}]
    (line,) = evaluation.read_mt_bench(b'{"question_id": 81, "turns": ["Write.", "Rewrite."]}\n')
    assert line == {"messages": [{"role": "user", "content": "Write."}]}


def test_what_follows_a_prompt_is_found_in_its_document():
    corpus = load("recipes/ablation/corpus.py")
    documents = [
        {"text": "import x\n\n\ndef f(a):\n    return a\n\n\ndef g():\n    pass\n"},
        {"text": "def f(a):\n    return b\n"},
    ]
    wanted = ["def f(a):\n    return a", "def g():", "def f(a):\n    return b", "def h():"]
    assert corpus.find_rests(documents, wanted) == {
        wanted[0]: "\n\n\ndef g():\n    pass\n",
        wanted[1]: "\n    pass\n",
        wanted[2]: "\n",
    }


def test_a_planted_difference_between_variants_is_found_and_none_where_there_is_none(ablate):
    draw = random.Random(0)
    results = []
    for variant, mean in (("term", 3.0), ("no term", 3.0), ("CE alone", 2.5)):
        for seed in range(3):
            steps = [max(round(120 / (mean + draw.gauss(0, 0.3))), 1) for _ in range(60)]
            rows = [None if i == 7 else (120, n) for i, n in enumerate(steps)]
            results.append({"variant": variant, "seed": seed, "counts": {"0": rows, "0.7": rows}})
    found = ablate.compare(results)
    for temperature in ("0", "0.7"):
        term, same, worse = (found[name][temperature] for name in ("term", "no term", "CE alone"))
        assert term["interval"][0] < 3.0 < term["interval"][1] and len(term["by_seed"]) == 3
        assert term["repeating_share"] == pytest.approx(1 / 60) and term["num_prompts"] == 59
        low, high = same["minus_reference_interval"]
        assert low < 0 < high
        assert worse["minus_reference"] == pytest.approx(-0.5, abs=0.1) and worse["minus_reference_interval"][1] < 0
    assert "| CE alone | 2." in ablate.table(found)


def test_variants_are_compared_on_the_prompts_that_repeat_in_none_of_them(ablate):
    # The second prompt is easy, and loops for one of the two; on the first one they are alike.
    rows = {"term": [(100, 50), (100, 10)], "no term": [(100, 50), None]}
    found = ablate.compare(
        [{"variant": v, "seed": 0, "counts": {"0": r, "0.7": [None, None]}} for v, r in rows.items()]
    )
    assert [found[v]["0"]["acceptance_length"] for v in rows] == [2.0, 2.0]
    assert found["no term"]["0"]["minus_reference"] == 0 and found["no term"]["0"]["repeating_share"] == 0.5
    assert "0.7" not in found["term"] and "at 0.7" not in ablate.table(found)


def test_the_published_comparison_follows_from_the_published_counts(ablate):
    details = json.loads((ROOT / "benchmarks/results/h200/nano-ablation.json").read_text())["details"]
    results = []
    for run in details["runs"]:
        counts = {
            t: [None if word == "-" else tuple(map(int, word.split("/"))) for word in words.split()]
            for t, words in run["counts"].items()
        }
        assert {t: ablate.in_words(rows) for t, rows in counts.items()} == run["counts"]
        results.append(run | {"counts": counts})
    assert json.loads(json.dumps(ablate.compare(results))) == details["variants"]
    guide = (ROOT / "docs/training.md").read_text()
    rows = [" ".join(line.split("|", 2)[2].split()) for line in ablate.table(details["variants"]).splitlines()[2:]]
    assert len(rows) == 5 and all(row in guide for row in rows)


def test_a_step_and_a_token_are_timed_behind_the_first_step(drafts):
    def answer(tokens: int, first: int, steps: int, seconds: float):
        return drafts.Answer(
            token_ids=list(range(tokens)),
            num_first=first,
            num_steps=steps,
            drafted=0,
            accepted=0,
            decode_s=seconds,
            off_after=None,
        )

    plain, drafted = [answer(11, 1, 11, 0.02)] * 3, [answer(11, 3, 5, 0.012)] * 3
    assert drafts.pool(plain) == pytest.approx({"acceptance_length": 1.0, "step_ms": 2.0, "tpot_ms": 2.0})
    assert drafts.pool(drafted) == pytest.approx({"acceptance_length": 2.2, "step_ms": 3.0, "tpot_ms": 1.5})
    found = drafts.summarise(plain, drafted)
    assert found["gain"] == pytest.approx(2.0 / 1.5) and found["gain_interval"] == pytest.approx((4 / 3, 4 / 3))


def test_answers_without_a_time_and_prompts_that_were_not_reached_are_left_out(drafts, monkeypatch):
    def answer(engine, prompt: list[int], max_tokens: int):
        num_tokens = prompt[0]
        num_steps = max(num_tokens // engine.pace, 1)
        return drafts.Answer(
            token_ids=list(range(num_tokens)),
            num_first=engine.pace,
            num_steps=num_steps,
            drafted=0,
            accepted=0,
            decode_s=0.01 * (num_steps - 1),
            off_after=None,
        )

    monkeypatch.setattr(drafts, "answer", answer)
    engines = {
        drafts.PLAIN: SimpleNamespace(pace=1, policy="", width_rule=None),
        "draft": SimpleNamespace(pace=2, policy="", width_rule=None),
    }
    settings = [drafts.Setting(name=name, engine=engine) for name, engine in engines.items()]
    # The time is up behind three prompts; the second one's answer is a single token.
    found = drafts.measure_set(None, settings, [[20], [1], [20], [20]], 32, stop_s=0.0)
    assert found["num_prompts"] == 2 and found["settings"]["draft"]["num_same"] == 2
    assert found["settings"]["draft"]["gain"] == pytest.approx(2.0)
    assert drafts.measure_set(None, settings, [[1]], 32, stop_s=0.0) is None
