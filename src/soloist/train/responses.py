"""The texts that a draft learns from: the target's own answers, kept as they come and checked to be its own.

Owns the file of answers, which a stopped run goes on with, the mix of temperatures, and the sources of answers: the
target in the batched generator, the target in `transformers`, and a server that speaks OpenAI's protocol.
"""

import json
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from soloist.errors import CheckpointError, SoloistError, UnsupportedError, UsageError
from soloist.models.causal_lm import CausalLM
from soloist.train.batches import Text
from soloist.train.capture import read_states
from soloist.train.documents import Documents
from soloist.train.generate import Request, generate
from soloist.train.packed import dense

FILE_NAME = "texts.jsonl"
# Texts that are looked at to tell whose they are, and the most tokens of each.
_CHECKED_TEXTS, _CHECKED_TOKENS = 64, 512
# Greedy answers of another model agree less; the target's own, at another precision, more.
MIN_GREEDY_AGREEMENT = 0.9
# Nats that drawn tokens may be less likely than the law says.
MAX_SURPRISE = 0.25
_TIMEOUT_S = 600


class Source(Protocol):
    """Answers a batch of prompts."""

    @property
    def batch_size(self) -> int:
        """Prompts that it is best given at once."""

    def answer(self, requests: Sequence[Request], seed: int) -> list[Text]:
        """Answer every prompt; an empty answer is left out."""


@dataclass(frozen=True, kw_only=True)
class OwnSource:
    """The target in the batched generator of `generate`."""

    model: CausalLM
    max_new_tokens: int
    num_tokens: int
    eos_token_ids: tuple[int, ...]
    batch_size: int = 256
    dtype: torch.dtype | None = None

    def answer(self, requests: Sequence[Request], seed: int) -> list[Text]:
        return generate(
            self.model,
            requests,
            max_new_tokens=self.max_new_tokens,
            num_tokens=self.num_tokens,
            eos_token_ids=self.eos_token_ids,
            seed=seed,
            dtype=self.dtype,
        )


@dataclass(frozen=True, kw_only=True)
class TransformersSource:
    """The target in `transformers`, for architectures that it has and long answers of large models on a GPU."""

    # From `AutoModelForCausalLM`.
    model: Any
    max_new_tokens: int
    eos_token_ids: tuple[int, ...]
    batch_size: int = 64

    def answer(self, requests: Sequence[Request], seed: int) -> list[Text]:
        # One temperature at a time, padded on the left.
        texts: dict[int, Text] = {}
        for temperature in sorted({request.temperature for request in requests}):
            own = [i for i, request in enumerate(requests) if request.temperature == temperature]
            longest = max(len(requests[i].prompt_ids) for i in own)
            pads = [longest - len(requests[i].prompt_ids) for i in own]
            ids = torch.tensor([[0] * pad + [*requests[i].prompt_ids] for i, pad in zip(own, pads, strict=True)])
            mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in pads])
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
            torch.manual_seed(seed)
            out = self.model.generate(
                ids.to(self.model.device),
                attention_mask=mask.to(self.model.device),
                max_new_tokens=self.max_new_tokens,
                eos_token_id=list(self.eos_token_ids) or None,
                pad_token_id=0,
                **(sampling if temperature else {"do_sample": False}),
            )
            for i, row in zip(own, out[:, longest:].tolist(), strict=True):
                stop = next((n + 1 for n, token in enumerate(row) if token in self.eos_token_ids), len(row))
                prompt = requests[i].prompt_ids
                texts[i] = Text(token_ids=(*prompt, *row[:stop]), num_prompt=len(prompt), temperature=temperature)
        return [texts[i] for i in sorted(texts)]


def load_transformers_source(
    path: Path,
    device: torch.device,
    dtype: torch.dtype,
    max_new_tokens: int,
    eos_token_ids: Sequence[int],
    *,
    batch_size: int,
) -> TransformersSource:
    """Load a model with `transformers`.

    Raises:
        UnsupportedError: the package is not there, or does not know the architecture.
    """
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise UnsupportedError("--source transformers needs the package: pip install transformers") from None
    model: Any
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, trust_remote_code=False)
    except (ValueError, RuntimeError, OSError) as error:
        raise UnsupportedError(f"transformers does not load {path} ({error}): take --source own, or --url") from error
    return TransformersSource(
        model=model.to(device).eval(),
        max_new_tokens=max_new_tokens,
        eos_token_ids=tuple(eos_token_ids),
        batch_size=batch_size,
    )


@dataclass(frozen=True, kw_only=True)
class RemoteSource:
    """A server with OpenAI's `/v1/completions` that serves the target."""

    # Up to and with `/v1`.
    url: str
    # Its name there.
    model: str
    max_new_tokens: int
    # To text, special tokens kept; and of a whole text back to ids, as prompts are read.
    decode: Callable[[Sequence[int]], str]
    encode: Callable[[str], list[int]]
    # Requests under way at once.
    num_parallel: int = 16
    api_key: str | None = None
    batch_size: int = 256

    def answer(self, requests: Sequence[Request], seed: int) -> list[Text]:
        with ThreadPoolExecutor(self.num_parallel) as pool:
            answers = pool.map(self._ask, requests, range(seed, seed + len(requests)))
            return [text for text in answers if text is not None]

    def _ask(self, request: Request, seed: int) -> Text | None:
        prompt = self.decode(request.prompt_ids)
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": self.max_new_tokens,
            "temperature": request.temperature,
            "seed": seed % 2**31,
        }
        answer = self._post(body)
        ids = tuple(self.encode(prompt + answer))
        n = len(request.prompt_ids)
        # Text whose tokens run across the end of the prompt says nothing about what follows it.
        if not answer or ids[:n] != request.prompt_ids or len(ids) == n:
            return None
        return Text(token_ids=ids, num_prompt=n, temperature=request.temperature)

    def _post(self, body: dict[str, Any]) -> str:
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        url = f"{self.url.rstrip('/')}/completions"
        try:
            request = urllib.request.Request(url, json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as reply:
                return str(json.load(reply)["choices"][0]["text"])
        except (urllib.error.URLError, ValueError, KeyError, IndexError, TimeoutError) as error:
            raise SoloistError(
                f"{url} gave no completion ({error}): is a server with OpenAI's completions there, and is its model"
                f" {body['model']!r}?"
            ) from error


def collect_texts(
    source: Source,
    prompts: Sequence[Sequence[int]],
    temperatures: Sequence[float],
    *,
    seed: int,
    file: Path | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Text]:
    """Have every prompt answered once, the temperatures taking turns.

    Args:
        source: of the answers.
        prompts: token ids.
        temperatures: prompt i is answered at the i-th, and round again.
        seed: of the draws.
        file: keeps the answers; what it has of these prompts is not asked for again.
        on_progress: called with (prompts answered, prompts).

    Raises:
        CheckpointError: the file is of other prompts.
    """
    requests = [
        Request(prompt_ids=tuple(prompt), temperature=temperatures[i % len(temperatures)])
        for i, prompt in enumerate(prompts)
    ]
    known = {} if file is None else _read_known(file, requests)
    # Of about the same length together: they stand at the same position.
    open_numbers = sorted((i for i in range(len(requests)) if i not in known), key=lambda i: len(prompts[i]))
    on_progress(len(known), len(requests))
    for start in range(0, len(open_numbers), source.batch_size):
        own = open_numbers[start : start + source.batch_size]
        by_prompt: dict[tuple[tuple[int, ...], float], list[int]] = {}
        for i in own:
            by_prompt.setdefault((requests[i].prompt_ids, requests[i].temperature), []).append(i)
        found = {}
        for text in source.answer([requests[i] for i in own], seed + own[0]):
            prompt = text.token_ids[: text.num_prompt]
            found[by_prompt[prompt, text.temperature].pop()] = text
        # An answer that never came is kept as such, so that it is not asked for again.
        fresh: dict[int, Text | None] = {i: found.get(i) for i in own}
        known |= fresh
        if file is not None:
            _append(file, requests, fresh)
        on_progress(len(known), len(requests))
    return [kept for i in sorted(known) if (kept := known[i]) is not None and kept.num_candidates > 0]


def _read_known(file: Path, requests: Sequence[Request]) -> dict[int, Text | None]:
    """Read the answers that a file holds; a last line that was cut short counts as not there."""
    known: dict[int, Text | None] = {}
    if not file.is_file():
        return known
    lines = file.read_text().split("\n")
    for line in lines[:-1]:
        kept = json.loads(line)
        i = kept["prompt"]
        is_same = i < len(requests) and kept["temperature"] == requests[i].temperature
        if not is_same or tuple(kept["ids"][: kept["num_prompt"]]) != requests[i].prompt_ids:
            raise CheckpointError(f"{file} has answers to other prompts: give the same prompts, or another folder")
        text = Text(token_ids=tuple(kept["ids"]), num_prompt=kept["num_prompt"], temperature=kept["temperature"])
        known[i] = text if text.num_candidates else None
    if lines[-1]:
        file.write_text("".join(f"{line}\n" for line in lines[:-1]))
    return known


def _append(file: Path, requests: Sequence[Request], texts: dict[int, Text | None]) -> None:
    """Add answers, each a line; a prompt without one is a line too."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as stream:
        for i, text in texts.items():
            ids = requests[i].prompt_ids if text is None else text.token_ids
            line = {"prompt": i, "temperature": requests[i].temperature, "num_prompt": len(requests[i].prompt_ids)}
            stream.write(json.dumps(line | {"ids": ids}) + "\n")


@dataclass(frozen=True, kw_only=True)
class Ownership:
    """How far texts are what the target itself would have said."""

    # Share of the tokens of greedy answers that are the target's likeliest. None: there are no greedy answers.
    greedy_agreement: float | None
    # Nats by which drawn tokens are less likely than the law says they should be. None: there are none.
    surprise: float | None

    @property
    def fault(self) -> str | None:
        """What is wrong, in words. None: nothing."""
        found = []
        if self.greedy_agreement is not None and self.greedy_agreement < MIN_GREEDY_AGREEMENT:
            found.append(f"only {self.greedy_agreement:.0%} of the greedy answers' tokens are the target's likeliest")
        # A surprise that is no number is a fault too.
        if self.surprise is not None and not self.surprise <= MAX_SURPRISE:
            found.append(f"drawn tokens are {self.surprise:.2f} nats less likely than the target's law says")
        if not found:
            return None
        return (
            f"{' and '.join(found)}: the answers are not the target's own. A draft trained on them is accepted less"
            " than its loss says; usual causes: another model or quantisation behind the URL, another chat template,"
            " or sampling settings that were not asked for"
        )


@torch.no_grad()
def check_ownership(target: CausalLM, texts: Sequence[Text], num_tokens: int, dtype: torch.dtype) -> Ownership:
    """Hold some texts against the target's own law.

    Args:
        target: the model that the draft is for.
        texts: with answers that are said to be its own.
        num_tokens: ids that may be drawn.
        dtype: of activations.
    """
    step = max(len(texts) // _CHECKED_TEXTS, 1)
    checked = [text for text in texts[::step] if text.num_prompt < _CHECKED_TOKENS][:_CHECKED_TEXTS]
    head = dense(target.lm_head)[:num_tokens].to(dtype)
    hits, excess = [], []
    for text in checked:
        ids = torch.tensor(text.token_ids[:_CHECKED_TOKENS], device=target.device)
        states = read_states(target, ids, Documents([len(ids)], target.device), (), dtype)
        logits = F.linear(states.last[text.num_prompt - 1 : -1], head).float()
        answer = ids[text.num_prompt :]
        if text.temperature == 0:
            hits += (logits.argmax(-1) == answer).tolist()
        else:
            law = (logits / text.temperature).log_softmax(-1)
            entropy = -(law.exp() * law).sum(-1)
            excess += (-law.gather(1, answer[:, None])[:, 0] - entropy).tolist()
    return Ownership(
        greedy_agreement=sum(hits) / len(hits) if hits else None,
        surprise=sum(excess) / len(excess) if excess else None,
    )


def require_own(found: Ownership) -> None:
    """Refuse texts that are not the target's.

    Raises:
        UsageError: they are not.
    """
    if found.fault is not None:
        raise UsageError(found.fault)


def describe_mix(texts: Sequence[Text]) -> dict[str, int]:
    """Count the texts by the temperature they were drawn at, for the card."""
    return {f"{t:g}": count for t, count in sorted(Counter(text.temperature for text in texts).items())}
