"""Programs that measure models through a server, offline: lm-eval and guidellm. Run by `make test-clients`."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from soloist.llm import LLM
from soloist.prefix import PrefixStore
from soloist.sampling_params import SamplingParams
from soloist.server.app import App
from tests.clients.served import served
from tests.tiny_model import write_tiny_model

NUM_ITEMS = 20
TASK = """
task: tiny_choice
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""
SAY = """
task: tiny_say
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[0]}}}}"
generation_kwargs:
  until: ["zzz"]
  max_gen_toks: 5
  temperature: 0
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[tuple[str, App]]:
    llm = LLM(folder, dtype="float32", num_threads=1)
    llm.engine.prefixes = PrefixStore(host_bytes=1 << 26)
    with served(llm) as (url, app):
        yield url, app


def run(program: str, *words: str, folder: Path) -> str:
    """Run a program of this environment, offline, and give what it printed."""
    if importlib.util.find_spec(program) is None:
        pytest.skip(f"{program} is not installed")
    offline = {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(folder / "hf"),
        "OPENAI_API_KEY": "none",
    }
    done = subprocess.run(
        [sys.executable, "-m", program, *words],
        env=os.environ | offline,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def write_tasks(folder: Path) -> list[dict[str, Any]]:
    words = ["quick", "brown", "lazy", "fox", "dog"]
    items = [
        {"question": f"the {words[i % 5]} {words[i // 5]}", "choices": [" jumps", " over"], "answer": i % 2}
        for i in range(NUM_ITEMS)
    ]
    data = folder / "items.jsonl"
    data.write_text("".join(json.dumps(item) + "\n" for item in items))
    for name, text in (("choice", TASK), ("say", SAY)):
        (folder / f"{name}.yaml").write_text(text.format(data=data))
    return items


def samples(folder: Path, task: str) -> list[dict[str, Any]]:
    (path,) = folder.glob(f"**/samples_{task}_*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("backend", ["remote", "huggingface"])
def test_lm_eval_gets_the_models_own_log_probabilities(server, folder: Path, tmp_path: Path, backend: str):
    url, app = server
    items = write_tasks(tmp_path)
    arguments = f"model=tiny,base_url={url}/v1/completions,tokenizer_backend={backend}"
    if backend == "huggingface":
        arguments += f",tokenizer={folder}"
    run(
        "lm_eval", "--model", "local-completions", "--model_args", arguments, "--tasks", "tiny_choice,tiny_say",
        "--include_path", str(tmp_path), "--output_path", str(tmp_path / "out"), "--log_samples", "--batch_size", "4",
        folder=tmp_path,
    )  # fmt: skip
    choices, said = samples(tmp_path, "tiny_choice"), samples(tmp_path, "tiny_say")
    assert len(choices) == len(said) == NUM_ITEMS
    llm, tokenizer = app.service.llm, app.service.llm.tokenizer
    assert tokenizer is not None
    for sample in choices:
        item = items[sample["doc_id"]]
        context = tokenizer.encode(item["question"])
        for i, choice in enumerate(item["choices"]):
            whole = tokenizer.encode(item["question"] + choice)
            generation = llm.engine.generate(whole, SamplingParams(max_tokens=1), prompt_logprobs=1)
            list(generation)
            expected = sum(entry.logprob for entry in generation.prompt_logprobs[len(context) - 1 :])
            assert float(sample["resps"][i][0][0]) == pytest.approx(expected, abs=2e-3)
    for sample in said:
        expected_text = llm.generate(items[sample["doc_id"]]["question"], SamplingParams(max_tokens=5)).text
        assert sample["resps"][0][0] == expected_text


def test_guidellm_measures_every_request(server, folder: Path, tmp_path: Path):
    url, app = server
    report = tmp_path / "report.json"
    run(
        "guidellm", "run", "--backend", f"kind=openai_http,target={url},model=tiny",
        "--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=10",
        "--data", "kind=synthetic_text,prompt_tokens=40,output_tokens=12",
        "--tokenizer", f"kind=huggingface_auto,model={folder}",
        "--output", f"kind=json,path={report}", "--disable-console",
        folder=tmp_path,
    )  # fmt: skip
    content = json.loads(report.read_text())
    (benchmark,) = content["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (10, 0)
    assert benchmark["metrics"]["output_token_count"]["successful"]["mean"] == 12
    last = list(app.service.receipts)[-10:]
    assert {receipt["completion_tokens"] for receipt in last} == {12}
