"""Measures soloist-nano on held-out code: bits per byte beside gzip and an n-gram model, and what it writes.

A completion counts as parsing if, cut behind its last complete statement, prompt and completion are valid Python and
something of the completion is left.
"""

import argparse
import ast
import gzip
import json
import math
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from data import packs
from train_tokenizer import texts

from prompts import make_prompts, write_prompts
from soloist import LLM, SamplingParams
from soloist.loading import choose_device
from soloist.models import load_model
from soloist.models.causal_lm import CausalLM
from soloist.tokenizer import Tokenizer
from soloist.train.documents import Documents
from soloist.train.evaluate import distinct_ratio
from soloist.train.generate import Request, generate
from soloist.train.packed import final_norm_packed, forward_packed

NUM_PROMPTS, MAX_TOKENS = 100, 128
NGRAM_ORDER = 5
PACK_TOKENS = 16384
# A parser's flag, as `codeop` uses it: text that may go on is told from text that is wrong.
ALLOW_INCOMPLETE = 0x4000


def parses(prompt: str, completion: str, is_ended: bool) -> bool:
    """Say whether the text is valid up to its last complete statement, and that lies in the completion.

    Args:
        prompt: valid code that may stop within a block.
        completion: what follows; its last line is taken for unfinished unless it `is_ended`.
        is_ended: whether the model ended the text itself.
    """
    text = prompt + completion
    ends = [i + 1 for i, character in enumerate(text) if character == "\n"] + ([len(text)] if is_ended else [])
    for end in reversed(ends):
        if end <= len(prompt) or not text[len(prompt) : end].strip():
            return False
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                compile(text[:end], "completion", "exec", ast.PyCF_ONLY_AST | ALLOW_INCOMPLETE)
            return True
        except SyntaxError as error:
            if "incomplete input" not in str(error):
                return False
        except (ValueError, MemoryError):
            return False
    return False


def complete(llm: LLM, prompts: list[dict]) -> list[dict]:
    """Continue the prompts greedily."""
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    answers = (llm.generate(prompt["text"], params) for prompt in prompts)
    return [
        describe(prompt, answer.token_ids, answer.text, answer.finish_reason == "stop")
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def complete_batched(folder: Path, prompts: list[dict], device: torch.device) -> list[dict]:
    """Continue the prompts greedily, all at once and without an engine: nothing is compiled."""
    model, tokenizer = load(folder, device), Tokenizer.load(folder)
    requests = [Request(prompt_ids=tuple(tokenizer.encode(p["text"])), temperature=0.0) for p in prompts]
    stops = sorted(tokenizer.stop_ids)
    texts = generate(
        model, requests, max_new_tokens=MAX_TOKENS, num_tokens=tokenizer.num_tokens, eos_token_ids=stops, seed=0
    )
    answers = [list(text.token_ids[text.num_prompt :]) for text in texts]
    return [
        describe(prompt, ids, tokenizer.decode(ids), ids[-1] in stops)
        for prompt, ids in zip(prompts, answers, strict=True)
    ]


def describe(prompt: dict, token_ids: list[int], text: str, is_ended: bool) -> dict:
    """Say what there is to say of a completion."""
    return {
        "source": prompt["source"],
        "path": prompt["path"],
        "tokens": len(token_ids),
        "distinct_4_grams": round(distinct_ratio(token_ids), 4),
        "parses": parses(prompt["text"], text, is_ended),
        "prompt": prompt["text"],
        "completion": text,
    }


def load(folder: Path, device: torch.device) -> CausalLM:
    """Load the model with weights that can be computed with as they are."""
    is_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if is_gpu else torch.float32
    return load_model(folder, device=device, dtype=dtype, weights_dtype="bf16" if is_gpu else "fp32")


@torch.no_grad()
def model_nats(folder: Path, tokens: np.ndarray, end: int, device: torch.device) -> float:
    """Give the negative log likelihood of all tokens; of a document's first, and of each 2048th, that of a guess."""
    model = load(folder, device)
    # The last pack is filled up, and what fills it is not counted.
    num_packs = -(-len(tokens) // PACK_TOKENS)
    padded = np.concatenate([tokens, np.full(num_packs * PACK_TOKENS - len(tokens), end, dtype=tokens.dtype)])
    total, left = 0.0, len(tokens)
    for ids, lengths in packs(padded, end, PACK_TOKENS, seed=None):
        documents = Documents(lengths.tolist(), device)
        row = torch.from_numpy(ids.astype(np.int64)).to(device)
        hidden, _ = forward_packed(model, row, documents)
        logits = final_norm_packed(model, hidden).float() @ model.lm_head.float().T
        nats = torch.nn.functional.cross_entropy(logits[:-1], row[1:], reduction="none")
        is_first = documents.positions == 0
        nats = torch.cat([nats.new_zeros(1), nats]).masked_fill(is_first, math.log(model.config.vocab_size))
        total += float(nats[:left].double().sum())
        left -= len(ids)
    return total


def ngram_nats(train: np.ndarray, held_out: np.ndarray, vocab_size: int) -> float:
    """Give the negative log likelihood of tokens under an n-gram model with Witten-Bell interpolation.

        P_n(w | h) = (c(h w) + d(h) P_{n-1}(w | h')) / (c(h) + d(h)),   d(h): different tokens seen behind h

    Tokens in front count as context whichever document they are of.
    """
    bits = (vocab_size - 1).bit_length()
    assert NGRAM_ORDER * bits <= 64
    p = np.full(len(held_out), 1.0 / vocab_size)

    def grams(tokens: np.ndarray, n: int) -> np.ndarray:
        codes = np.zeros(len(tokens) - n + 1, dtype=np.uint64)
        for i in range(n):
            codes = (codes << np.uint64(bits)) | tokens[i : len(tokens) - n + 1 + i].astype(np.uint64)
        return codes

    for n in range(1, NGRAM_ORDER + 1):
        found, counts = np.unique(grams(train, n), return_counts=True)
        contexts, first = np.unique(found >> np.uint64(bits), return_index=True)
        totals = np.add.reduceat(counts, first)
        kinds = np.diff(np.append(first, len(found)))
        asked = grams(held_out, n)

        def look_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
            place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
            return np.where(keys[place] == wanted, values[place], 0)

        history = asked >> np.uint64(bits)
        c_hw, c_h, d_h = (
            look_up(found, counts, asked),
            look_up(contexts, totals, history),
            look_up(contexts, kinds, history),
        )
        lower = p[n - 1 :]
        p[n - 1 :] = np.where(c_h > 0, (c_hw + d_h * lower) / np.maximum(c_h + d_h, 1), lower)
    return float(-np.log(p).sum())


def main() -> None:
    """Measure and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="folder with held_out.jsonl.gz and the two .npy")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file")
    parser.add_argument("--device", default=str(choose_device().device))
    parser.add_argument("--skip-baselines", action="store_true", help="leave out gzip and n-grams")
    parser.add_argument("--skip-likelihood", action="store_true", help="leave out bits per byte: slow on a CPU")
    parser.add_argument("--batched", action="store_true", help="complete without an engine: quick, and in other bits")
    args = parser.parse_args()
    device = torch.device(args.device)
    with gzip.open(args.data / "held_out.jsonl.gz", "rt") as file:
        documents = [json.loads(line) for line in file]
    tokenizer = Tokenizer.load(args.model)
    prompts = make_prompts(documents, NUM_PROMPTS, tokenizer.encode)
    if len(prompts) < NUM_PROMPTS:
        raise SystemExit(f"the held-out files give {len(prompts)} prompts, not {NUM_PROMPTS}")
    write_prompts(prompts, args.out.with_name("prompts.jsonl"))
    held_out = np.load(args.data / "held_out.npy")
    config = json.loads((args.model / "config.json").read_text())
    num_bytes = sum(len(text.encode()) for text in texts(args.data / "held_out.jsonl.gz"))
    result: dict = {"held_out_bytes": num_bytes, "held_out_tokens": len(held_out), "device": str(device)}
    if device.type == "cuda":
        result["device"] = torch.cuda.get_device_name(device)

    def write() -> None:
        result["evaluation_s"] = round(time.perf_counter() - start, 1)
        args.out.write_text(json.dumps(result | {"by_prompt": completions}, indent=1) + "\n")

    start = time.perf_counter()
    if args.batched:
        completions = complete_batched(args.model, prompts, device)
    else:
        completions = complete(LLM(args.model, device=device), prompts)
    shares = [c["distinct_4_grams"] for c in completions]
    result |= {
        "completions": len(completions),
        "parsing_share": sum(c["parses"] for c in completions) / len(completions),
        "distinct_4_gram_ratio_mean": round(float(np.mean(shares)), 4),
        "distinct_4_gram_ratio_median": round(float(np.median(shares)), 4),
        "share_with_ratio_0_6": float(np.mean(np.array(shares) >= 0.6)),
    }
    # What follows may fail, or take too long.
    write()
    if not args.skip_likelihood:
        nats = model_nats(args.model, held_out, config["eos_token_id"], device)
        result["bits_per_byte"] = round(nats / math.log(2) / num_bytes, 4)
    if not args.skip_baselines:
        raw = [text.encode() for text in texts(args.data / "held_out.jsonl.gz")]
        result["bits_per_byte_gzip_by_file"] = round(8 * sum(len(gzip.compress(d, 9)) for d in raw) / num_bytes, 4)
        result["bits_per_byte_gzip_whole"] = round(8 * len(gzip.compress(b"".join(raw), 9)) / num_bytes, 4)
        nats = ngram_nats(np.load(args.data / "train.npy"), held_out, config["vocab_size"])
        result[f"bits_per_byte_{NGRAM_ORDER}_gram"] = round(nats / math.log(2) / num_bytes, 4)
    write()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
