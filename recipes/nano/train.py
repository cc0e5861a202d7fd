"""Trains soloist-nano within a number of seconds and writes it as a public checkpoint.

The loss is that of the next token plus a share of the MTP layer's loss of the one behind it. Experts are kept in use by
their selection bias, which a step moves against their load. The rate warms up, stays, and falls in a straight line. The
last part of the time, at a small rate, also teaches the model not to repeat itself: it continues prompts greedily, and
tokens that close a run it has written before are made less likely. `plain` is the model before that part.

Sources: DeepSeek-V3, arXiv 2412.19437, sections 2.1.2 (bias) and 2.2 (MTP); neural text generation with unlikelihood
training, arXiv 1908.04319, section 5.2.
"""

import argparse
import json
import math
import shutil
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from data import Batch, Loader, make_batch, packs
from forward import Forward, limit_tuning
from optimizer import Optimizer
from polish import Prompts, pack_answers, read_beginnings
from safetensors.torch import load_file
from torch import Tensor

from soloist.models.bailing_moe_v3 import BailingMoeV3Config, BailingMoeV3ForCausalLM, BailingMoeV3MTP
from soloist.models.loader import Placement, RandomSource
from soloist.train.evaluate import distinct_ratio
from soloist.train.generate import Request, generate
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
    # T of a pack: enough that the GPU, and not the host, sets the pace.
    num_tokens: int = 98304
    lr: float = 4e-3
    weight_decay: float = 0.1
    warm_up: float = 0.02
    # Where the rate begins to fall, to nothing where unlikelihood training begins.
    decay_start: float = 0.45
    # What the last hidden state knows of the token behind the next is what drafts live on.
    mtp_weight: float = 0.5
    # How far a step moves an expert's selection bias at full rate.
    bias_step: float = 4e-3
    # Where unlikelihood training begins, at a share of the full rate that falls to nothing at the end.
    polish_start: float = 0.85
    polish_rate: float = 0.1
    polish_weight: float = 1.0
    # It rests while this share of the runs of four tokens in continuations is distinct: more costs likelihood.
    distinct_goal: float = 0.64
    # Continuations generated at once, tokens of each, and the run that may not come twice.
    num_continuations: int = 2048
    continuation_len: int = 128
    run_len: int = 10
    # Steps between two lines of the log, and seconds between two checkpoints.
    log_every: int = 50
    save_every_s: float = 60.0

    def rate(self, progress: float) -> float:
        """Give the learning rate at a share of the time, as a share of `lr`."""
        if progress < self.warm_up:
            return max(progress / self.warm_up, 0.01)
        if progress >= self.polish_start:
            return self.polish_rate * (1.0 - progress) / (1.0 - self.polish_start)
        return min((self.polish_start - progress) / (self.polish_start - self.decay_start), 1.0)


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
        data: folder with train.npy, held_out.npy and tokenizer.json, and draft_prompts.jsonl if there is one.
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
        file = data / "draft_prompts.jsonl"
        beginnings = read_beginnings(file, self.tokenizer_json) if file.is_file() else []
        self.prompts = Prompts(self.loader.tokens, beginnings, seed=0)
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
            unlikelihood = self.unlikelihood(*polish)
            (s.polish_weight * unlikelihood).backward()
            figures |= {"unlikelihood": unlikelihood.detach()}
            figures |= {"repeats": polish[1].sum() / (polish[0].labels >= 0).sum()}
        figures["grad_norm"] = self.optimizer.step(s.rate(progress))
        for bias, load, count in zip(self.expert_biases, self.load, counts, strict=True):
            bias.add_((count.mean() - count).sign(), alpha=s.bias_step * s.rate(progress))
            load.lerp_(count / count.mean(), 0.05)
        self.num_steps += 1
        return figures

    def unlikelihood(self, batch: Batch, is_repeat: Tensor) -> Tensor:
        """Give -log(1 - p) of the labels that repeat a run, as a mean over all that continue their prompt."""
        hidden, _ = self.forward.hidden(batch.pack, self.dtype)
        losses = self.forward.token_losses(hidden, self.forward.model.lm_head, batch.labels)
        # Below this, 1 - p is lost in fp32.
        other = torch.log(-torch.expm1(-losses.clamp(min=1e-6)))
        return -(other * is_repeat).sum() / (batch.labels >= 0).sum()

    def continue_prompts(self) -> tuple[list[tuple[Batch, Tensor] | None], float]:
        """Continue prompts from the training documents greedily.

        Returns:
            What `pack_answers` gives, or as many Nones where the continuations are varied enough; and the mean share
            of distinct runs of four tokens in them.
        """
        s = self.settings
        requests = [
            Request(prompt_ids=tuple(prompt), temperature=0.0) for prompt in self.prompts.draw(s.num_continuations)
        ]
        answers = generate(
            self.forward.model,
            requests,
            max_new_tokens=s.continuation_len,
            num_tokens=self.end + 1,
            eos_token_ids=[self.end],
            seed=0,
            dtype=self.dtype,
        )
        share = float(np.mean([distinct_ratio(answer.token_ids[answer.num_prompt :]) for answer in answers]))
        continued = pack_answers(answers, s.num_tokens, s.run_len, self.end, self.device)
        return [None if share >= s.distinct_goal else pack for pack in continued], share

    def evaluate(self) -> dict[str, float]:
        """Give the held-out losses, in nats a token; with gradients that nobody takes, as they are compiled anyway."""
        losses = [[loss.detach() for loss in self.losses(batch)[:2]] for batch in self.held_out]
        means = torch.tensor(losses).mean(0)
        return {"held_out_loss": round(float(means[0]), 4), "held_out_mtp_loss": round(float(means[1]), 4)}

    def resume(self, folder: Path) -> float:
        """Take over the weights of a checkpoint that a run left; the optimisers begin anew. Gives how far it was.

        They are rounded to bf16; the steps that are lost cost more than that.
        """
        kept = json.loads((folder / "progress.json").read_text())
        tensors: dict[str, Tensor] = {}
        for file in folder.glob("*.safetensors"):
            tensors |= load_file(file)
        with torch.no_grad():
            for name, tensor in self.source.stored.items():
                tensor.copy_(tensors[name])
        self.num_steps = kept["num_steps"]
        return float(kept["progress"])

    def save(self, name: str, progress: float) -> None:
        """Write the checkpoint beside its place, then put it there."""
        folder, scratch = self.out / name, self.out / f".{name}"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        self.source.save(scratch, torch.bfloat16, shard_bytes=SHARD_BYTES)
        kept = {"progress": progress, "num_steps": self.num_steps}
        (scratch / "progress.json").write_text(json.dumps(kept) + "\n")
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

    def run(self, progress: float = 0.0) -> None:
        """Train until the time is over. The clock starts behind the first step, which compiles.

        Args:
            progress: share of the time that is over, of a run that is resumed.
        """
        s = self.settings
        self.report(progress, self.step(progress))
        last_save = time.perf_counter()
        self.start_s = last_save - progress * s.seconds
        polish: list[tuple[Batch, Tensor] | None] = []
        # Checkpoints that are kept of the way, and where.
        marks = {"plain": s.polish_start, "half": (1.0 + s.polish_start) / 2}
        marks = {name: mark for name, mark in marks.items() if progress <= mark < 1.0}
        while True:
            progress = (time.perf_counter() - self.start_s) / s.seconds
            if progress >= 1.0:
                break
            for name in [name for name, mark in marks.items() if progress >= mark]:
                del marks[name]
                self.save(name, progress)
                self.report(progress, {}, **self.evaluate())
            is_new = progress >= s.polish_start and not polish
            more = {}
            if is_new:
                polish, share = self.continue_prompts()
                more["distinct"] = round(share, 4)
            figures = self.step(progress, polish.pop() if polish else None)
            if self.num_steps % s.log_every == 0 or is_new:
                if not math.isfinite(float(figures["loss"])):
                    raise SystemExit(f"the loss is {float(figures['loss'])} at step {self.num_steps}")
                self.report(progress, figures, **more)
            if time.perf_counter() - last_save > s.save_every_s:
                self.save("target", progress)
                self.report(progress, figures, **self.evaluate())
                last_save = time.perf_counter()
        self.save("target", 1.0)
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
    parser.add_argument("--no-polish", action="store_true", help="do without unlikelihood training")
    parser.add_argument("--plain", action="store_true", help="do without fla-core's kernel")
    parser.add_argument("--resume", type=Path, help="checkpoint of a run that was cut off, to go on from")
    parser.add_argument("--lr", type=float, default=Settings.lr)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    has_kernel = args.device == "cuda" and not args.plain
    if has_kernel:
        limit_tuning(NUM_CONFIGS)
    settings = Settings(seconds=args.seconds, num_tokens=args.num_tokens, lr=args.lr)
    if args.no_polish:
        settings = replace(settings, polish_start=1.0)
    trainer = Trainer(settings, args.data, args.out, torch.device(args.device), args.config, has_kernel)
    trainer.run(0.0 if args.resume is None else trainer.resume(args.resume))


if __name__ == "__main__":
    main()
