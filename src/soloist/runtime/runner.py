"""The model at work: prefill in chunks, passes on the rows of a step, the search for a layer that breaks.

Owns the model, the cache of its one sequence and the step's buffers. Decides nothing about drafts, tokens or requests.
"""

import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from soloist.errors import ContextLengthError, DoesNotFitError, UsageError
from soloist.models import memory
from soloist.models.cache import StepKind
from soloist.models.causal_lm import CausalLM, HiddenCapture
from soloist.runtime.buffers import StepBuffers

# Prompt tokens of one prefill chunk by device type: few enough to cancel soon, enough to keep the device busy. On a GPU
# every chunk reads all experts, and costs the host a launch of every kernel of every layer.
_CHUNK_TOKENS = {"cpu": 128, "cuda": 8192}
# Rows of a prompt's chunk for which kernels differ on a GPU: one, a step's, by the tiles of their attention, and more;
# kernels are compiled apart for sizes that are multiples of 16.
_PROMPT_ROWS = (1, 2, 4, 6, 8, 12, 16, 17, 32, 2048)
# What a step and a prompt's chunk need besides, by device type.
_SCRATCH_BYTES = {"cuda": 2 * 2**30}
# A step with fewer threads must take less than this share of the time to be preferred.
_THREAD_GAIN = 0.97
# Rows of a chunk while looking for the layer that breaks; every layer's rows are kept at once.
_SEARCH_ROWS = 32

# Called after each chunk with its (C,) ids, (C, D) hidden and (C, len(layers), D) captured states.
ChunkHook = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], None]


class ModelRunner:
    """Runs one model on one sequence.

    Args:
        model: the target.
        max_context_len: most tokens of a request, prompt and answer. None: what the model allows, less the rows that a
            step may write behind the last token.
        max_width: T, most rows of a step.
        num_tokens: N, ids that may be drawn; the model's head may have more rows, as padding. None: all rows.
        has_draft_probs: whether drafts have a law.
        capture_layers: layers whose residual stream is kept for the drafter.
        chunk_tokens: prompt tokens of one prefill chunk. None: by device.

    Raises:
        ContextLengthError: the model does not allow `max_context_len` tokens and those rows; it names how many.
        DoesNotFitError: the device has no memory for them; it names how many fit.
        UsageError: `max_context_len` leaves no room for a prompt and an answer.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        max_context_len: int | None = None,
        max_width: int = 1,
        num_tokens: int | None = None,
        has_draft_probs: bool = False,
        capture_layers: tuple[int, ...] = (),
        chunk_tokens: int | None = None,
    ) -> None:
        self.model = model
        # (N, D) fp32, where it is not the model's own that is used.
        self._fp32_head: torch.Tensor | None = None
        # A step that was enqueued behind the end of a full context still writes its T rows, from the last position on.
        overhang = max_width - 1
        wanted = _choose_context(model, max_context_len, overhang)
        num_rows = wanted + overhang
        try:
            if model.device.type in _SCRATCH_BYTES:
                # With what steps and prompts take besides: it should be missing now rather than in the first answer.
                needed = _fixed_bytes(model) + num_rows * _bytes_per_position(model)
                memory.check_fits(needed, model.device, f"a context of {num_rows} tokens, with room to work,")
            self.cache = model.make_cache(num_rows, max_width)
        except DoesNotFitError as error:
            raise DoesNotFitError(f"{error}; {_largest_context(model, overhang)}") from None
        self.max_context_len = wanted
        self.buffers = StepBuffers.allocate(
            max_width=max_width,
            num_tokens=num_tokens or model.config.vocab_size,
            has_draft_probs=has_draft_probs,
            device=self.cache.context_len.device,
        )
        device = self.cache.context_len.device
        self.chunk_tokens = chunk_tokens or _CHUNK_TOKENS.get(device.type, 128)
        self.capture = None
        if capture_layers:
            num_rows = max(min(self.chunk_tokens, self.max_context_len), max_width)
            shape = (num_rows, len(capture_layers), model.config.hidden_size)
            hidden = torch.zeros(shape, dtype=model.dtype, device=device)
            self.capture = HiddenCapture(layers=capture_layers, hidden=hidden)

    def prefill(
        self,
        input_ids: torch.Tensor,
        *,
        on_chunk: ChunkHook,
        on_progress: Callable[[int, int], None] | None = None,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Put prompt tokens behind what the cache holds, chunk by chunk.

        Args:
            input_ids: (n,) int64 on the model's device, n at least 0.
            on_chunk: what reads each chunk's hidden states.
            on_progress: called with (tokens done, tokens in all) before the first chunk and after each.
            is_cancelled: asked before each chunk.

        Returns:
            Whether all tokens were read; False after a cancel.
        """
        total = input_ids.shape[0]
        # Nothing is on its way that this would wait for.
        context_len = int(self.cache.context_len)
        for start in range(0, total, self.chunk_tokens):
            if on_progress is not None:
                on_progress(start, total)
            if is_cancelled():
                return False
            chunk = input_ids[start : start + self.chunk_tokens]  # (C,)
            with self.cache.known_len(context_len + start):
                hidden = self.model.forward(chunk, self.cache, StepKind.PREFILL, capture=self.capture)  # (C, D)
            on_chunk(chunk, hidden, self.captured(chunk.shape[0]))
            self.cache.commit(chunk.shape[0], StepKind.PREFILL)
        if on_progress is not None:
            on_progress(total, total)
        return not is_cancelled()

    def prompt_passes(self) -> list[Callable[[], None]]:
        """Give a pass for every form that reading a prompt has: to be compiled, not to be run."""
        most = min(self.chunk_tokens, self.max_context_len - 1)
        ids = torch.zeros(most, dtype=torch.int64, device=self.buffers.input_ids.device)

        def make_pass(num_rows: int) -> Callable[[], None]:
            def read() -> None:
                with self.cache.known_len(0):
                    self.model.forward(ids[:num_rows], self.cache, StepKind.PREFILL, capture=self.capture)

            return read

        return [make_pass(num_rows) for num_rows in _PROMPT_ROWS if num_rows <= most]

    def forward(self, num_rows: int) -> torch.Tensor:
        """Run the first rows of the step's input behind the committed sequence; nothing is committed.

        Args:
            num_rows: T of this step. The rows from `buffers.width` on are padding.

        Returns:
            (T, D) residual stream before the final norm.
        """
        buffers = self.buffers
        # One row needs no verification: it is part of the sequence whatever follows.
        kind = StepKind.DECODE if num_rows == 1 else StepKind.VERIFY
        input_ids = buffers.input_ids[:num_rows]
        return self.model.forward(input_ids, self.cache, kind, width=buffers.width, capture=self.capture)

    def widen_head(self) -> None:
        """From now on compute logits with a copy of the output head in fp32: what `--bf16-head` is measured against."""
        assert isinstance(self.model.lm_head, torch.Tensor)
        self._fp32_head = self.model.lm_head.float()  # (N, D)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Give the logits (T, N) fp32 of the tokens that may be drawn."""
        if self._fp32_head is not None:
            return F.linear(self.model.final_norm(hidden).float(), self._fp32_head)[:, : self.buffers.num_tokens]
        return self.model.compute_logits(hidden)[:, : self.buffers.num_tokens]

    def commit(self, num_committed: torch.Tensor, num_rows: int) -> None:
        """Advance the cache by the first `num_committed` () int32 rows of the last step, which had `num_rows`."""
        self.cache.commit(num_committed, StepKind.DECODE if num_rows == 1 else StepKind.VERIFY)

    def captured(self, num_rows: int) -> torch.Tensor | None:
        """Give what the last forward pass kept of the capture layers: (T, layers, D); None without capture layers."""
        return None if self.capture is None else self.capture.hidden[:num_rows]

    def locate_non_finite(self, token_ids: Sequence[int]) -> str:
        """Run a sequence again, with every layer watched, and say in words where the first NaN or infinity arises.

        The cache is left empty.

        Args:
            token_ids: prompt and answer, up to the token whose step failed.
        """
        config = self.model.config
        layers = tuple(range(-1, config.num_hidden_layers))
        device = self.cache.context_len.device
        shape = (_SEARCH_ROWS, len(layers), config.hidden_size)
        capture = HiddenCapture(layers=layers, hidden=torch.zeros(shape, dtype=self.model.dtype, device=device))
        input_ids = torch.tensor(token_ids, device=device)
        self.cache.reset()
        try:
            for start in range(0, len(token_ids), _SEARCH_ROWS):
                chunk = input_ids[start : start + _SEARCH_ROWS]
                hidden = self.model.forward(chunk, self.cache, StepKind.PREFILL, capture=capture)
                self.cache.commit(chunk.shape[0], StepKind.PREFILL)
                is_bad = ~capture.hidden[: chunk.shape[0]].isfinite().all(-1)  # (C, L+1)
                if is_bad.any():
                    layer = layers[int(is_bad.any(0).int().argmax())]
                    position = start + int(is_bad[:, layer + 1].int().argmax())
                    name = "the embedding" if layer < 0 else f"layer {layer}"
                    return f"{name} is the first whose output is not finite, at position {position}"
                if not self.model.compute_logits(hidden).amax(-1).isfinite().all():
                    return "every layer's output is finite, the output head's is not"
        finally:
            self.cache.reset()
        return "the same tokens, run again in one piece, gave finite values everywhere"


def _choose_context(model: CausalLM, asked: int | None, overhang: int) -> int:
    """Give the tokens of context that were asked for, or the most that the model and a step's rows leave.

    Raises:
        ContextLengthError: more were asked for.
        UsageError: there is no room for a prompt and an answer.
    """
    limit = model.config.max_position_embeddings
    most = limit - overhang
    wanted = most if asked is None else asked
    if wanted < 2:
        raise UsageError(f"a context of {wanted} tokens; allowed: at least 2, one of prompt and one of answer")
    if wanted > most:
        of_step = f", and a step with drafts needs {overhang} of them behind the last token" if overhang else ""
        raise ContextLengthError(
            f"a context of {wanted} tokens is asked for; the model has {limit}{of_step}: ask for at most {most} tokens"
        )
    return wanted


def _fixed_bytes(model: CausalLM) -> int:
    """Give what this rank needs for a sequence of any length: recurrent state, scratch of a step and of a prompt."""
    footprint = model.footprint
    return footprint.state_bytes + footprint.conv_state_bytes + _SCRATCH_BYTES.get(model.device.type, 0)


def _bytes_per_position(model: CausalLM) -> int:
    """Give what this rank needs for each position: its rows of the cache, and what a prompt makes of them."""
    is_counted = model.device.type in _SCRATCH_BYTES
    return model.footprint.kv_bytes_per_position + (model.prompt_bytes_per_position if is_counted else 0)


def _largest_context(model: CausalLM, overhang: int) -> str:
    """Say in words how many tokens of context fit beside the weights."""
    room = memory.free_bytes(model.device) - _fixed_bytes(model)
    largest = int(room / _bytes_per_position(model)) - overhang
    return (
        f"the largest context that fits is {largest} tokens" if largest >= 2 else "no context fits beside the weights"
    )


@torch.inference_mode()
def measure_num_threads(runner: ModelRunner) -> int:
    """Choose the number of CPU threads: halve what torch would take as long as a decode step gets faster.

    Torch takes OMP_NUM_THREADS if that is set. Takes about four steps for every count tried; the sequence in the
    runner's cache is forgotten.
    """

    def step_s(num_threads: int) -> float:
        torch.set_num_threads(num_threads)
        times = []
        for _ in range(4):
            start_s = time.perf_counter()
            runner.forward(1)
            times.append(time.perf_counter() - start_s)
        return min(times)

    best = torch.get_num_threads()
    if best > 1:
        best_s = step_s(best)
        while best > 1 and (half_s := step_s(best // 2)) < best_s * _THREAD_GAIN:
            best, best_s = best // 2, half_s
        runner.cache.reset()
    return best
