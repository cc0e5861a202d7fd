"""What one step must move, and the time no machine of a given bandwidth can go below.

Owns the byte arithmetic of prefill-free steps (decode, verify, draft) and the bandwidth measurement. It is given a
model's parts and never builds or reads a model: `models.footprint` counts them.
"""

import time
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch


class Reads(Enum):
    """How much of a part one step reads."""

    # All of it, once, whatever the width.
    ALL = "all"
    # One row per token: an embedding.
    ROW = "row"
    # The experts that the step's tokens chose.
    EXPERTS = "experts"


@dataclass(frozen=True, kw_only=True)
class WeightPart:
    """Tensors of one role, over all layers."""

    name: str
    parameters: int
    # Bytes in memory; 0 for an output head that is the embedding's own tensor.
    weight_bytes: int
    # Bytes that move when all of it is read once.
    read_bytes: int
    reads: Reads
    # What a token chooses from: rows of the table, experts of one layer; 1 for `Reads.ALL`.
    num_choices: int
    # Whether tensor parallelism divides it; otherwise every GPU holds and reads all of it.
    is_sharded: bool


@dataclass(frozen=True, kw_only=True)
class StepBytes:
    """Bytes one GPU moves in one step."""

    # Weights that do not depend on routing.
    weights: float
    routed_experts: float
    # Recurrent and convolution state, read once and written once.
    state: float
    # Cached keys and values, or latents, read once.
    kv: float

    @property
    def total(self) -> float:
        """All of them together."""
        return self.weights + self.routed_experts + self.state + self.kv


def expected_distinct_experts(num_experts: int, num_experts_per_tok: int, width: int) -> float:
    """Expect how many experts of a layer `width` tokens choose together, each uniformly: E * (1 - (1 - A/E)^T)."""
    return num_experts * (1 - (1 - num_experts_per_tok / num_experts) ** width)


def floor_ms(num_bytes: float, bandwidth_gb_per_s: float) -> float:
    """Give the time that moving `num_bytes` takes at a bandwidth in 10^9 bytes per second."""
    return num_bytes / bandwidth_gb_per_s / 1e6


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """The parts of one model, and what follows from them."""

    parts: tuple[WeightPart, ...]
    num_layers: int
    # 0 for a model without experts.
    num_experts_per_tok: int
    # Recurrent state of one sequence.
    state_bytes: int
    # Convolution inputs of one sequence.
    conv_state_bytes: int
    # Cached rows of one position, all layers.
    kv_bytes_per_position: int
    # GPUs that can share the cached rows: key/value heads, or 1 where all heads share one latent.
    num_kv_shards: int

    @property
    def parameters(self) -> int:
        """Parameters of all parts."""
        return sum(part.parameters for part in self.parts)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in memory, on one GPU that holds them all."""
        return sum(part.weight_bytes for part in self.parts)

    @property
    def bytes_per_token(self) -> float:
        """Weight bytes one decoded token reads; state and cache come on top, see `step_bytes`."""
        step = self.step_bytes()
        return step.weights + step.routed_experts

    @property
    def num_experts(self) -> int:
        """Experts of one layer, 0 for a model without."""
        return max((part.num_choices for part in self.parts if part.reads is Reads.EXPERTS), default=0)

    def distinct_experts(self, width: int) -> float:
        """Expect how many experts of a layer a step of this width reads under uniform routing; 0 without experts."""
        if not self.num_experts:
            return 0.0
        return expected_distinct_experts(self.num_experts, self.num_experts_per_tok, width)

    def step_bytes(
        self,
        width: int = 1,
        context_len: int = 0,
        *,
        tensor_parallel_size: int = 1,
        distinct_experts: float | None = None,
    ) -> StepBytes:
        """Count what one GPU moves in a decode or verify step.

        Args:
            width: rows of the step, at least 1.
            context_len: positions in the cache.
            tensor_parallel_size: GPUs that share the model.
            distinct_experts: experts read per layer, the mean over layers, if it was measured; None: uniform routing.
        """
        if distinct_experts is None:
            distinct_experts = self.distinct_experts(width)
        weights = experts = 0.0
        for part in self.parts:
            read_bytes = part.read_bytes / (tensor_parallel_size if part.is_sharded else 1)
            if part.reads is Reads.EXPERTS:
                experts += read_bytes * distinct_experts / part.num_choices
            elif part.reads is Reads.ROW:
                weights += read_bytes * width / part.num_choices
            else:
                weights += read_bytes
        return StepBytes(
            weights=weights,
            routed_experts=experts,
            state=2 * (self.state_bytes + self.conv_state_bytes) / tensor_parallel_size,
            kv=context_len * self.kv_bytes_per_position / min(tensor_parallel_size, self.num_kv_shards),
        )

    def num_all_reduces(self, tensor_parallel_size: int) -> int:
        """Count a step's exchanges between GPUs: two per layer, one behind the embedding, one of the logits' maxima."""
        return 2 * self.num_layers + 2 if tensor_parallel_size > 1 else 0

    def step_floor_ms(
        self,
        width: int = 1,
        context_len: int = 0,
        *,
        bandwidth_gb_per_s: float,
        tensor_parallel_size: int = 1,
        distinct_experts: float | None = None,
        draft_bytes: float = 0.0,
        all_reduce_us: float = 0.0,
    ) -> float:
        """Give the time below which no step can go.

        Args:
            width: see `step_bytes`, as `context_len`, `tensor_parallel_size` and `distinct_experts`.
            context_len: as there.
            bandwidth_gb_per_s: of one GPU's memory, read only.
            tensor_parallel_size: as there.
            distinct_experts: as there.
            draft_bytes: what one GPU reads to draft for this step.
            all_reduce_us: time of one exchange of the target; 0 gives the floor of the bytes alone.
        """
        step = self.step_bytes(
            width, context_len, tensor_parallel_size=tensor_parallel_size, distinct_experts=distinct_experts
        )
        exchanges_ms = self.num_all_reduces(tensor_parallel_size) * all_reduce_us / 1e3
        return floor_ms(step.total + draft_bytes, bandwidth_gb_per_s) + exchanges_ms

    def describe(self) -> dict[str, Any]:
        """Give the figures of `soloist models describe --json`.

        Weight bytes are by part, with their sum under `total`; bytes by width are of a whole step without a context.
        """
        widths = (1, 2, 4, 6, 8, 9, 10, 16)
        by_part = {part.name: part.weight_bytes for part in self.parts}
        return {
            "parameters": self.parameters,
            "weight_bytes": by_part | {"total": self.weight_bytes},
            "bytes_per_token": round(self.bytes_per_token),
            "bytes_by_width": {str(width): round(self.step_bytes(width).total) for width in widths},
            "distinct_experts_by_width": {
                str(width): round(self.distinct_experts(width), 1) for width in widths if self.num_experts
            },
            "state_bytes": self.state_bytes,
            "conv_state_bytes": self.conv_state_bytes,
            "kv_bytes_per_position": self.kv_bytes_per_position,
        }


# Far more than any cache holds, and read in a few milliseconds to a few tenths of a second.
CPU_MEASURE_BYTES = 2**29
CUDA_MEASURE_BYTES = 2**32


def measure_bandwidth(device: torch.device | str, *, num_bytes: int | None = None, repeats: int = 15) -> float:
    """Measure the read-only bandwidth of a device's memory, in 10^9 bytes per second: the best of some sums.

    Args:
        device: a CPU (read with torch's current number of threads) or a CUDA device.
        num_bytes: bytes of the buffer that is read; None chooses more than the caches hold.
        repeats: how many times.
    """
    device = torch.device(device)
    if num_bytes is None:
        num_bytes = CUDA_MEASURE_BYTES if device.type == "cuda" else CPU_MEASURE_BYTES
    x = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    total = torch.empty((), dtype=torch.float32, device=device)
    seconds = []
    for _ in range(repeats):
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            torch.sum(x, dim=0, out=total)
            end.record()
            end.synchronize()
            seconds.append(start.elapsed_time(end) / 1e3)
        else:
            begin = time.perf_counter()
            torch.sum(x, dim=0, out=total)
            seconds.append(time.perf_counter() - begin)
    return x.numel() * x.element_size() / min(seconds) / 1e9
