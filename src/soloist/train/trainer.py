"""The training loop: states from the target, a step of the draft, figures, checkpoints.

Everything random is a function of the seed and the step, so that a run that was stopped goes on to the same bits, and
one that is spread over processes computes the same. Parameters and optimiser are fp32, activations are not.
"""

import importlib
import importlib.util
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from soloist.errors import CheckpointError, NumericsError, UsageError
from soloist.models.causal_lm import CausalLM
from soloist.train.batches import Batch, Text, choose_texts, digest_of, draw_bases, make_batch
from soloist.train.capture import MemoryStore, States, Store, read_states
from soloist.train.muon import Muon
from soloist.train.network import DraftNetwork
from soloist.train.objective import (
    SlotFigures,
    acceptance_length,
    draft_loss,
    make_weights,
    slot_weights,
)
from soloist.train.operators import changing_shapes
from soloist.train.packed import dense, final_norm_weight
from soloist.train.resident import Found, RecordedStep, ResidentTexts
from soloist.train.settings import TrainSettings

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# Adam's memory of gradients and of their squares.
BETAS = (0.9, 0.95)
# What the optimisers remember of a parameter.
STATE_KEYS = ("step", "exp_avg", "exp_avg_sq", "momentum_buffer")
STATE_NAME, METRICS_NAME = "training-state.safetensors", "metrics.jsonl"
# Of fp32: half a GB.
LOGITS_AT_ONCE = 2**27
# Batches of held-out texts that figures are taken from.
MAX_HELD_OUT_BATCHES = 8


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What a step, or the held-out texts, showed. Lengths count the bonus token."""

    step: int
    loss: float
    # Expected accepted drafts + 1, at the texts' own temperatures, and where both laws are greedy.
    acceptance_length: float
    greedy_acceptance_length: float
    # By slot, of those that are reached.
    acceptance_by_slot: tuple[float, ...]


# Called behind a logged step with the figures, the steps in all and tokens per second.
OnStep = Callable[[Figures, int, float], None]


class _Step(nn.Module):
    """One pass of network and loss: what DDP wraps."""

    def __init__(self, network: DraftNetwork, lm_head: torch.Tensor, settings: TrainSettings) -> None:
        super().__init__()
        self.network, self.settings = network, settings
        self.lm_head = lm_head

    def forward(
        self, batch: Batch, states: States, totals: torch.Tensor, is_last_stage: bool
    ) -> tuple[torch.Tensor, SlotFigures]:
        s, network = self.settings, self.network
        hidden, markov, confidences = network(
            states.captured, batch.documents, batch.anchor_ids, batch.anchors, batch.previous_ids
        )
        is_counted = batch.is_counted.flatten(0, 1)  # (n*A, B)
        weights = make_weights(
            is_counted, s.objective, is_last_stage=is_last_stage, total_weight=totals[0], total_blocks=totals[1]
        )
        temperatures = torch.ones_like(batch.temperatures)
        if s.objective.min_temperature is not None:
            temperatures = batch.temperatures.clamp(min=s.objective.min_temperature)
        return draft_loss(
            hidden,
            markov,
            None if network.markov_head is None else network.markov_head.markov_w2.weight,
            confidences,
            lm_head=self.lm_head,
            teacher=states.last.index_select(0, batch.teacher_rows.flatten()),
            labels=batch.labels.flatten(),
            temperatures=temperatures[:, None, None].expand_as(batch.labels).flatten(),
            weights=weights,
            rows=s.loss_rows or max(LOGITS_AT_ONCE // self.lm_head.shape[0], 1),
            is_compiled=s.is_compiled,
        )


def learning_rate(settings: TrainSettings, step: int) -> float:
    """Give the rate of a step: a line up, then a cosine down to 0."""
    warmup = max(round(settings.warmup_share * settings.num_steps), 1)
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(settings.num_steps - warmup, 1)
    return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * done))


def make_optimizers(
    parameters: dict[str, nn.Parameter], settings: TrainSettings, device: torch.device
) -> list[torch.optim.Optimizer]:
    """Make what changes the parameters: AdamW, and Muon for the matrices that map hidden states if it is asked for.

    Tables of the vocabulary are never orthogonalised: the Markov head then stays without effect. Only matrices and
    tables decay. What records steps reads the rate from the device.
    """
    is_muon = settings.optimizer == "muon"
    maps = [p for name, p in parameters.items() if is_muon and p.dim() == 2 and name.startswith(("layers.", "fc."))]
    rest = [p for p in parameters.values() if all(p is not other for other in maps)]
    is_gpu, decay = device.type == "cuda", settings.weight_decay
    is_recorded = is_gpu and settings.is_recorded

    def rate() -> float | torch.Tensor:
        return torch.tensor(settings.learning_rate, device=device) if is_recorded else settings.learning_rate

    groups = [
        {"params": [p for p in rest if p.dim() > 1], "weight_decay": decay, "lr": rate()},
        {"params": [p for p in rest if p.dim() == 1], "weight_decay": 0.0, "lr": rate()},
    ]
    groups = [group for group in groups if group["params"]]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(groups, rate(), BETAS, fused=is_gpu, capturable=is_recorded)
    ]
    if maps:
        optimizers.append(Muon(maps, rate(), decay))
    return optimizers


def read_num_steps(folder: Path) -> int | None:
    """Say how many steps the run has whose checkpoint is in a folder; None: there is none."""
    if not (folder / STATE_NAME).is_file():
        return None
    with safe_open(folder / STATE_NAME, framework="pt") as file:
        return int(json.loads(file.metadata()["settings"])["num_steps"])


class Trainer:
    """Trains one draft for one target.

    Args:
        target: dense or hybrid, dense weights.
        texts: prompts with the target's own answers; each answer has at least a token.
        settings: of the run.
        num_tokens: ids that may be drawn; rows of the head behind them are padding.
        folder: of checkpoints and metrics; one that holds a checkpoint of the same run is gone on with.
        store: hidden states that were computed before. None: they are computed in every step.
        is_alone: train in this process, whatever others there are.

    Raises:
        UsageError: too few texts, processes that do not divide the documents of a step, or steps that are to be
            recorded by several processes or without states in memory.
        CheckpointError: the folder's checkpoint is of other settings.
    """

    def __init__(
        self,
        target: CausalLM,
        texts: Sequence[Text],
        settings: TrainSettings,
        *,
        num_tokens: int | None = None,
        folder: Path | None = None,
        store: Store | None = None,
        is_alone: bool = False,
    ) -> None:
        self.target, self.settings, self.folder, self._store = target, settings, folder, store
        self.config = settings.shape.config_for(target.config)
        num_held_out = max(round(len(texts) * settings.held_out_share), 1)
        if len(texts) - num_held_out < 1:
            raise UsageError(f"{len(texts)} texts: one to train on and one to hold out are the least")
        order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(settings.seed)).tolist()
        self.held_out, self.trained = order[:num_held_out], order[num_held_out:]
        self.texts = texts
        # Which texts a checkpoint is of.
        self._digest = "" if folder is None else digest_of(texts)
        self.device, self.dtype = target.device, DTYPES[settings.compute_dtype]
        head = dense(target.lm_head)[: num_tokens or target.config.vocab_size]
        self.network = DraftNetwork(self.config, target.embed_tokens, settings.seed, final_norm_weight(target))
        is_shared = dist.is_initialized() and not is_alone
        self.rank, self.num_ranks = (dist.get_rank(), dist.get_world_size()) if is_shared else (0, 1)
        if settings.documents_per_step % self.num_ranks:
            raise UsageError(
                f"documents_per_step is {settings.documents_per_step}, not a multiple of {self.num_ranks} processes"
            )
        # The head in the dtype of activations, once.
        self._step = _Step(self.network, head.to(self.dtype), settings)
        self._module: nn.Module = self._step
        if self.num_ranks > 1:
            self._module = DistributedDataParallel(self._step)
        self.parameters = dict(self.network.named_parameters())
        self.optimizers = make_optimizers(self.parameters, settings, self.device)
        self._recorded: RecordedStep | None = None
        if settings.is_recorded:
            self._recorded = self._make_recorded()
        self.step = 0
        # A TensorBoard writer, if the package is installed.
        self._board: Any = None
        if folder is not None and (folder / STATE_NAME).is_file():
            self._resume(folder / STATE_NAME)

    def _make_recorded(self) -> RecordedStep:
        """Bring what steps need to the device."""
        s, store = self.settings, self._store
        if not isinstance(store, MemoryStore) or self.num_ranks > 1:
            raise UsageError("recorded steps need states that are kept in memory, and one process")
        # Steps know texts by number, and take states as they are kept.
        kept, own = ([text.token_ids for text in texts] for texts in (store.texts, self.texts))
        assert kept == own and store.last.dtype == self.dtype, "the states are of other texts"
        count = s.documents_per_step
        texts = ResidentTexts(store, count=count, num_anchors=s.anchors_per_document, block_size=s.shape.block_size)

        def update(numbers: torch.Tensor, bases: torch.Tensor, is_last_stage: bool) -> Found:
            batch, states = texts.read(numbers, bases)
            return batch, *self._update(batch, states, is_last_stage)

        stages = (False, True) if s.objective.length_weight > 0 else (False,)
        return RecordedStep(update, count=count, stages=stages, device=self.device)

    def run(self, num_steps: int | None = None, on_step: OnStep | None = None) -> None:
        """Train up to a step.

        Args:
            num_steps: where to stop. None: at the end.
            on_step: hears of every `log_every`-th step.

        Raises:
            NumericsError: the loss is not finite.
        """
        s = self.settings
        stop = s.num_steps if num_steps is None else min(num_steps, s.num_steps)
        logged_s, num_tokens = time.perf_counter(), 0
        while self.step < stop:
            chosen = choose_texts(len(self.trained), s.documents_per_step, s.seed, self.step)
            # Every `num_ranks`-th document is this process's.
            numbers = [self.trained[i] for i in chosen[self.rank :: self.num_ranks]]
            found = self._train_step(numbers)
            num_tokens += sum(len(self.texts[i].token_ids) for i in numbers) * self.num_ranks
            self.step += 1
            is_logged = self.step % s.log_every == 0 or self.step == s.num_steps
            is_saved = self.step % s.checkpoint_every == 0 or self.step == stop
            if (is_logged or is_saved) and not math.isfinite(loss := float(found[1])):
                raise NumericsError(
                    f"the loss is {loss} at step {self.step}: take a smaller learning rate, or fp32; the last"
                    " checkpoint is from before"
                )
            if is_logged:
                figures = self._summarise([found])
                now_s = time.perf_counter()
                tok_per_s = num_tokens / (now_s - logged_s)
                logged_s, num_tokens = now_s, 0
                self._log("step", figures, tok_per_s=tok_per_s)
                if on_step is not None:
                    on_step(figures, s.num_steps, tok_per_s)
            if is_saved:
                self.save_state()

    def _train_step(self, numbers: Sequence[int]) -> Found:
        s, step = self.settings, self.step
        rate = learning_rate(s, step)
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        is_last_stage = s.objective.length_weight > 0 and step >= round((1 - s.objective.length_share) * s.num_steps)
        if self._recorded is not None:
            return self._recorded.run(numbers, draw_bases(numbers, s.seed, step), is_last_stage)
        batch, states = self._read(numbers, step)
        with changing_shapes():
            return batch, *self._update(batch, states, is_last_stage)

    def _update(self, batch: Batch, states: States, is_last_stage: bool) -> tuple[torch.Tensor, SlotFigures]:
        """Change the parameters, without the host."""
        totals = self._totals(batch)
        if self.num_ranks > 1:
            dist.all_reduce(totals)
        loss, figures = self._module(batch, states, totals, is_last_stage)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        # DDP averages gradients; the loss is a sum over processes.
        (loss * self.num_ranks).backward()
        nn.utils.clip_grad_norm_(self.parameters.values(), self.settings.max_grad_norm)
        for optimizer in self.optimizers:
            optimizer.step()
        return loss.detach(), figures

    def _read(self, numbers: Sequence[int], step: int) -> tuple[Batch, States]:
        """Pack texts by their numbers, choose anchors for a step, and get the target's states."""
        s = self.settings
        batch = make_batch(
            [self.texts[i] for i in numbers],
            numbers,
            num_anchors=s.anchors_per_document,
            block_size=s.shape.block_size,
            seed=s.seed,
            step=step,
            device=self.device,
        )
        if self._store is not None:
            return batch, self._store.read(numbers, self.device, self.dtype)
        layers = self.config.target_layer_ids
        return batch, read_states(self.target, batch.input_ids, batch.documents, layers, self.dtype)

    def _totals(self, batch: Batch) -> torch.Tensor:
        """Sum the weights of a batch's slots, and count its blocks: (2,) fp32."""
        is_counted = batch.is_counted.flatten(0, 1)
        weights = slot_weights(is_counted, self.settings.objective).sum()
        return torch.stack([weights, is_counted.any(dim=1).sum().float()])

    def _summarise(self, results: Sequence[Found]) -> Figures:
        """Bring figures of this process's batches to the host, as means over blocks that count whole."""
        is_counted = torch.cat([batch.is_counted.flatten(0, 1) for batch, _, _ in results])
        acceptance = torch.cat([figures.acceptance for _, _, figures in results])
        agreement = torch.cat([figures.agreement for _, _, figures in results])
        loss = sum(loss for _, loss, _ in results) / len(results)
        by_slot = (acceptance * is_counted).sum(0) / is_counted.sum(0).clamp(min=1)
        return Figures(
            step=self.step,
            loss=float(loss),
            acceptance_length=float(acceptance_length(acceptance, is_counted)),
            greedy_acceptance_length=float(acceptance_length(agreement, is_counted)),
            acceptance_by_slot=tuple(by_slot.tolist()),
        )

    @torch.no_grad()
    @changing_shapes()
    def measure(self) -> Figures:
        """Predict the acceptance length on held-out texts, along the text as it is (teacher forcing).

        Every process measures the same.
        """
        size, results = self.settings.documents_per_step // self.num_ranks, []
        for start in range(0, min(len(self.held_out), size * MAX_HELD_OUT_BATCHES), size):
            batch, states = self._read(self.held_out[start : start + size], 0)
            loss, figures = self._step(batch, states, self._totals(batch), False)
            results.append((batch, loss, figures))
        found = self._summarise(results)
        self._log("held out", found)
        return found

    def _log(self, kind: str, figures: Figures, **more: float) -> None:
        if self.folder is None or self.rank != 0:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / METRICS_NAME).open("a") as file:
            file.write(json.dumps({"kind": kind} | vars(figures) | more) + "\n")
        if self._board is None and importlib.util.find_spec("tensorboard") is not None:
            self._board = importlib.import_module("torch.utils.tensorboard").SummaryWriter(self.folder / "tensorboard")
        if self._board is not None:
            for name in ("loss", "acceptance_length", "greedy_acceptance_length"):
                self._board.add_scalar(f"{kind}/{name}", getattr(figures, name), figures.step)
            self._board.flush()

    def save_state(self) -> None:
        """Write parameters, the optimiser's memory and the step, whole or not at all."""
        if self.folder is None or self.rank != 0:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"parameter.{name}": p.detach() for name, p in self.parameters.items()}
        for optimizer in self.optimizers:
            for p, state in optimizer.state.items():
                name = next(name for name, other in self.parameters.items() if other is p)
                tensors |= {f"{key}.{name}": value for key, value in state.items()}
        unfinished = self.folder / (STATE_NAME + ".part")
        metadata = {
            "step": str(self.step),
            "settings": json.dumps(self.settings.to_json()),
            "texts": self._digest,
        }
        save_file({name: t.contiguous() for name, t in tensors.items()}, unfinished, metadata=metadata)
        unfinished.rename(self.folder / STATE_NAME)

    def _resume(self, path: Path) -> None:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
        given, kept = self.settings.to_json(), json.loads(metadata["settings"])
        if json.loads(json.dumps(given)) != kept:
            changed = [key for key in given if json.loads(json.dumps(given[key])) != kept.get(key)]
            raise CheckpointError(
                f"{path} is of a run with other settings ({', '.join(changed)}): give the same, or another folder"
            )
        if metadata["texts"] != self._digest:
            raise CheckpointError(f"{path} is of a run on other texts: give the same, or another folder")
        tensors = load_file(path, device=str(self.device))
        with torch.no_grad():
            for name, p in self.parameters.items():
                p.copy_(tensors[f"parameter.{name}"])
        names = {p: name for name, p in self.parameters.items()}
        for optimizer in self.optimizers:
            for p in (p for group in optimizer.param_groups for p in group["params"]):
                keys = [key for key in STATE_KEYS if f"{key}.{names[p]}" in tensors]
                optimizer.state[p] = {key: tensors[f"{key}.{names[p]}"] for key in keys}
        self.step = int(metadata["step"])
