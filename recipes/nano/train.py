"""Trains soloist-nano within a number of seconds and writes it as a public checkpoint.

The loss is that of the next token plus a share of the MTP layer's loss of the one behind it. Experts are kept in use by
their selection bias, which a step moves against their load. The rate warms up, stays, and falls in a straight line. The
last part of the time also teaches the model not to repeat itself: it continues prompts greedily, and tokens that close
a run it has written before are made less likely.

Sources: DeepSeek-V3, arXiv 2412.19437, sections 2.1.2 (bias) and 2.2 (MTP); neural text generation with unlikelihood
training, arXiv 1908.04319, section 5.2.
"""

import argparse
import json
import math
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from data import Batch, Loader, make_batch, packs
from forward import Forward, limit_tuning
from optimizer import Optimizer
from torch import Tensor

from soloist.models.bailing_moe_v3 import BailingMoeV3Config, BailingMoeV3ForCausalLM, BailingMoeV3MTP
from soloist.models.loader import Placement, RandomSource
from soloist.train.parameters import TrainableSource

HERE = Path(__file__).parent
# Launch settings that are tried of each kernel of fla-core.
NUM_CONFIGS = 3
# Most bytes of a file of the checkpoint.
SHARD_BYTES = 12 * 2**20


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Of a run; times are shares of its seconds."""

    seconds: float
    # T of a pack.
    num_tokens: int = 65536
    lr: float = 4e-3
    weight_decay: float = 0.1
    warm_up: float = 0.02
    # Where the rate begins to fall, and where it is as low as it gets.
    decay_start: float = 0.5
    decay_end: float = 0.9
    lowest_rate: float = 0.05
    mtp_weight: float = 0.3
    # How far a step moves an expert's selection bias.
    bias_step: float = 1e-3
    # Where unlikelihood training begins.
    polish_start: float = 0.9
    polish_weight: float = 1.0
    # Tokens of a prompt and of its continuation, and the run of tokens that may not come twice.
    prompt_len: int = 128
    continuation_len: int = 128
    run_len: int = 6
    # Steps on one set of continuations.
    polish_steps: int = 4
    save_every_s: float = 60.0
    log_every: int = 50

    def rate(self, progress: float) -> float:
        """Give the learning rate at a share of the time, as a share of `lr`."""
        if progress < self.warm_up:
            return max(progress / self.warm_up, 0.01)
        fall = min(max((progress - self.decay_start) / (self.decay_end - self.decay_start), 0.0), 1.0)
        return 1.0 - fall * (1.0 - self.lowest_rate)


def make_model(
    config_json: Path, device: torch.device, has_kernel: bool
) -> tuple[TrainableSource, Forward, dict[str, Tensor]]:
    """Draw the weights: maps with a deviation of 0.5 / sqrt(inputs), those into the residual stream a quarter of it."""
    config = BailingMoeV3Config.from_dict(json.loads(config_json.read_text()))
    source = TrainableSource(RandomSource(0, Placement(device=device, dtype=torch.float32)))
    model = BailingMoeV3ForCausalLM(config, source)
    mtp = BailingMoeV3MTP(model, source)
    parameters = source.parameters(model, mtp)
    generator = torch.Generator(device).manual_seed(1)
    with torch.no_grad():
        for name, tensor in parameters.items():
            if name.endswith("A_log"):
                tensor.zero_()
            elif name.endswith("dt_bias"):
                # Log decays from 1/1000 to 1 a token, spread evenly in their logarithm.
                share = torch.rand(tensor.shape, generator=generator, device=device).mul(-math.log(1000)).exp()
                tensor.copy_(torch.logit(share / -config.kda_lower_bound))
            elif name.endswith("conv"):
                tensor.normal_(0.0, 0.5, generator=generator)
            elif tensor.dim() >= 2:
                scale = 0.125 if name.endswith(("o_proj", "down", "shared_down")) else 0.5
                tensor.normal_(0.0, scale * tensor.shape[-1] ** -0.5, generator=generator)
    forward = Forward(model, mtp, compiles=device.type == "cuda", has_kernel=has_kernel)
    return source, forward, parameters


class Trainer:
    """One run.

    Args:
        settings: of the run.
        data: folder with train.npy, held_out.npy and tokenizer.json.
        out: gets the checkpoint and the log.
        device: where.
        config_json: of the model.
        has_kernel: see `Forward`.
    """

    def __init__(
        self,
        settings: Settings,
        data: Path,
        out: Path,
        device: torch.device,
        config_json: Path,
        has_kernel: bool = False,
    ) -> None:
        self.settings, self.out, self.device = settings, out, device
        self.config_json, self.tokenizer_json = config_json, data / "tokenizer.json"
        self.source, self.forward, self.parameters = make_model(config_json, device, has_kernel)
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.optimizer = Optimizer(self.parameters, settings.lr, settings.weight_decay)
        self.end = json.loads(config_json.read_text())["eos_token_id"]
        self.loader = Loader(data / "train.npy", self.end, settings.num_tokens, device)
        held_out = packs(np.load(data / "held_out.npy"), self.end, settings.num_tokens, seed=None)
        self.held_out = [make_batch(*pack, device) for _, pack in zip(range(4), held_out, strict=False)]
        blocks = [b for b in self.forward.model.feed_forwards if hasattr(b, "expert_bias")]
        self.expert_biases = [*(b.expert_bias for b in blocks), self.forward.mtp.feed_forward.expert_bias]
        self.load = [torch.ones_like(bias) for bias in self.expert_biases]
        self.log = (out / "log.jsonl").open("a")
        self.num_steps, self.start_s = 0, time.perf_counter()

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Give the mean losses of the next token and of the one behind it, and each layer's expert loads."""
        head = self.forward.model.lm_head
        hidden, counts = self.forward.hidden(batch.pack, self.dtype)
        mtp_hidden, mtp_counts = self.forward.mtp_hidden(hidden, batch.next_ids, batch.pack)
        means = []
        for rows, labels in ((hidden, batch.labels), (mtp_hidden, batch.mtp_labels)):
            means.append(self.forward.token_losses(rows, head, labels).sum() / (labels >= 0).sum().clamp(min=1))
        return means[0], means[1], [*counts, *mtp_counts]

    def step(self, progress: float, polish: tuple[Batch, Tensor] | None = None) -> dict[str, Tensor]:
        """Take one step on the next batch, and on continuations if there are any; gives figures, on the device."""
        s = self.settings
        loss, mtp_loss, counts = self.losses(self.loader.next())
        (loss + s.mtp_weight * mtp_loss).backward()
        figures = {"loss": loss.detach(), "mtp_loss": mtp_loss.detach()}
        if polish is not None:
            batch, is_repeat = polish
            unlikelihood = self.unlikelihood(batch, is_repeat)
            (s.polish_weight * unlikelihood).backward()
            figures |= {"unlikelihood": unlikelihood.detach(), "repeats": is_repeat.float().sum() / self.num_generated}
        figures["grad_norm"] = self.optimizer.step(s.rate(progress))
        for bias, load, count in zip(self.expert_biases, self.load, counts, strict=True):
            bias.add_((count.mean() - count).sign(), alpha=s.bias_step * s.rate(progress))
            load.lerp_(count / count.mean(), 0.05)
        self.num_steps += 1
        return figures

    def unlikelihood(self, batch: Batch, is_repeat: Tensor) -> Tensor:
        """Give -log(1 - p) of the tokens (T,) that repeat a run, a mean over all that were generated."""
        hidden, _ = self.forward.hidden(batch.pack, self.dtype)
        log_p = -self.forward.token_losses(hidden, self.forward.model.lm_head, batch.labels)
        other = torch.log1p(-log_p.exp().clamp(max=1 - 1e-4))
        return -(other * is_repeat).sum() / self.num_generated

    @property
    def num_generated(self) -> int:
        """Tokens of one set of continuations."""
        s = self.settings
        return s.num_tokens // (s.prompt_len + s.continuation_len) * s.continuation_len

    @torch.no_grad()
    def continue_prompts(self) -> tuple[Batch, Tensor]:
        """Continue the beginnings of documents greedily.

        Returns:
            The continued documents as a pack, and (T,) bool: whether a position's label closes a run of tokens that
            its continuation has held before.
        """
        s = self.settings
        total = s.prompt_len + s.continuation_len
        num_documents = s.num_tokens // total
        tokens = self.loader.tokens
        starts = np.random.default_rng(self.num_steps).integers(0, len(tokens) - s.prompt_len, num_documents)
        rows = np.zeros((num_documents, total), dtype=np.int64)
        rows[:, : s.prompt_len] = tokens[starts[:, None] + np.arange(s.prompt_len)]
        lengths = np.full(num_documents, total)
        batch = make_batch(rows.reshape(-1), lengths, self.device)
        ids = batch.pack.input_ids.view(num_documents, total)
        for place in range(s.prompt_len, total):
            hidden, _ = self.forward.hidden(batch.pack, self.dtype)
            last = hidden.view(num_documents, total, -1)[:, place - 1]
            ids[:, place] = (last @ self.forward.model.lm_head.to(last.dtype).T)[:, : self.end + 1].argmax(-1)
        is_repeat = torch.zeros_like(ids, dtype=torch.bool)
        runs = ids[:, s.prompt_len :].unfold(1, s.run_len, 1)  # (n, runs, run_len)
        same = (runs[:, :, None] == runs[:, None]).all(-1).tril(-1).any(-1)  # (n, runs)
        # A position's label is the token behind it.
        is_repeat[:, s.prompt_len + s.run_len - 2 : -1] = same
        labels = ids.roll(-1, dims=1)
        labels[:, -1] = -100
        return Batch(
            pack=batch.pack, next_ids=batch.next_ids, labels=labels.flatten(), mtp_labels=batch.mtp_labels
        ), is_repeat.flatten()

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Give the held-out losses, in nats a token."""
        losses = [self.losses(batch)[:2] for batch in self.held_out]
        return {
            "held_out_loss": float(torch.stack([loss for loss, _ in losses]).mean()),
            "held_out_mtp_loss": float(torch.stack([loss for _, loss in losses]).mean()),
        }

    def save(self, name: str) -> None:
        """Write the checkpoint beside its place, then put it there."""
        folder, scratch = self.out / name, self.out / f".{name}"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        self.source.save(scratch, torch.bfloat16, shard_bytes=SHARD_BYTES)
        shutil.copy(self.config_json, scratch / "config.json")
        shutil.copy(self.tokenizer_json, scratch / "tokenizer.json")
        shutil.rmtree(folder, ignore_errors=True)
        scratch.rename(folder)

    def report(self, progress: float, figures: dict[str, Tensor], **more: float) -> None:
        """Write a line of the log, and show it."""
        elapsed = time.perf_counter() - self.start_s
        load = torch.stack(self.load)
        line = {"step": self.num_steps, "elapsed_s": round(elapsed, 1), "progress": round(progress, 4)}
        line |= {name: round(float(value), 4) for name, value in figures.items()} | more
        line |= {"tokens": self.num_steps * self.settings.num_tokens, "least_load": round(float(load.min()), 3)}
        line |= {"most_load": round(float(load.max()), 3)}
        print(json.dumps(line), flush=True)
        print(json.dumps(line), file=self.log, flush=True)

    def run(self) -> None:
        """Train until the time is over. The clock starts behind the first step, which compiles."""
        s = self.settings
        self.report(0.0, self.step(0.0))
        self.start_s = last_save = time.perf_counter()
        polish, uses = None, 0
        is_polished = False
        while True:
            progress = (time.perf_counter() - self.start_s) / s.seconds
            if progress >= 1.0:
                break
            if progress >= s.polish_start:
                if not is_polished:
                    self.save("plain")
                    self.report(progress, {}, **self.evaluate())
                    is_polished = True
                if polish is None or uses == s.polish_steps:
                    polish, uses = self.continue_prompts(), 0
                uses += 1
            figures = self.step(progress, polish)
            if self.num_steps % s.log_every == 0 or (polish is not None and uses == 1):
                if not math.isfinite(float(figures["loss"])):
                    raise SystemExit(f"the loss is {float(figures['loss'])} at step {self.num_steps}")
                self.report(progress, figures)
            if time.perf_counter() - last_save > s.save_every_s:
                self.save("target")
                self.report(progress, figures, **self.evaluate())
                last_save = time.perf_counter()
        self.save("target")
        self.report(1.0, {}, **self.evaluate())
        (self.out / "settings.json").write_text(json.dumps(asdict(s), indent=1) + "\n")


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with train.npy, held_out.npy, tokenizer.json")
    parser.add_argument("--out", type=Path, required=True, help="gets target/, plain/, log.jsonl and settings.json")
    parser.add_argument("--seconds", type=float, required=True, help="time to train for, compiling aside")
    parser.add_argument("--config", type=Path, default=HERE / "config.json")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--num-tokens", type=int, default=Settings.num_tokens, help="tokens of a step")
    parser.add_argument("--plain", action="store_true", help="do without fla-core's kernel")
    parser.add_argument("--lr", type=float, default=Settings.lr)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    has_kernel = args.device == "cuda" and not args.plain
    if has_kernel:
        limit_tuning(NUM_CONFIGS)
    settings = Settings(seconds=args.seconds, num_tokens=args.num_tokens, lr=args.lr)
    Trainer(settings, args.data, args.out, torch.device(args.device), args.config, has_kernel).run()


if __name__ == "__main__":
    main()
