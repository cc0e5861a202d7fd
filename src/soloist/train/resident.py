"""Steps without the host: texts and states that stay on the device, batches of one shape, and CUDA graphs of a step.

A draft of a small target is trained in steps of about a thousand operations of a few microseconds each, which a
processor cannot launch as fast as a GPU runs them. Here it hands over which texts a step is of, and launches one graph.

Owns the tables and the graphs; what is computed is the trainer's.
"""

from collections.abc import Callable, Sequence

import torch

from soloist.runtime.graph import without_collection
from soloist.train.batches import Batch, place_blocks
from soloist.train.capture import MemoryStore, States
from soloist.train.documents import Documents, send
from soloist.train.objective import SlotFigures

# What an update gives: the batch, its loss, and what was found at its slots.
Found = tuple[Batch, torch.Tensor, SlotFigures]
# Steps before the first that is recorded: they compile, and allocate what is kept from step to step.
WARM_STEPS = 3


class ResidentTexts:
    """Makes batches of texts by their numbers, every text as long as the longest.

    Args:
        store: of the texts and their states.
        count: n, texts of a batch.
        num_anchors: A, the most of a text.
        block_size: B.
    """

    def __init__(self, store: MemoryStore, *, count: int, num_anchors: int, block_size: int) -> None:
        texts, device = store.texts, store.last.device
        self._store, self._num_anchors, self._block_size = store, num_anchors, block_size
        columns = [store.starts[:-1], [len(text.token_ids) for text in texts], [text.num_prompt for text in texts]]
        self._table = send(torch.tensor(columns), device)  # (3, texts)
        self._temperatures = send(torch.tensor([text.temperature for text in texts]), device)
        self._num_places = max(text.num_candidates for text in texts)
        max_len = max(columns[1])
        self._documents = Documents([max_len] * count, device)
        # Every batch has the same, and making it takes the host.
        self._documents.padded()
        self._position = torch.arange(max_len, device=device)  # (S,)

    def read(self, numbers: torch.Tensor, bases: torch.Tensor) -> tuple[Batch, States]:
        """Give the batch of some texts (n,), with anchors drawn from `bases` (n,); both int64, on the device."""
        starts, length, num_prompt = self._table[:, numbers]  # (n,) each
        # Behind a text's end its last row is repeated.
        rows = (starts[:, None] + self._position.minimum(length[:, None] - 1)).flatten()  # (n*S,)
        batch = place_blocks(
            self._store.ids.index_select(0, rows).long(),
            self._documents,
            length,
            num_prompt,
            self._temperatures.index_select(0, numbers),
            bases,
            num_places=self._num_places,
            num_anchors=self._num_anchors,
            block_size=self._block_size,
        )
        store = self._store
        return batch, States(captured=store.captured.index_select(0, rows), last=store.last.index_select(0, rows))


class RecordedStep:
    """Runs steps by number, on a GPU as CUDA graphs behind the first few.

    What a step gives is overwritten by the next one.

    Args:
        update: takes texts (n,), what their anchors are drawn from (n,), both int64 on the device, and whether the
            objective is that of the last stage; does the whole step, without the host.
        count: n.
        stages: of the objective, that there will be.
        device: where.
    """

    def __init__(
        self,
        update: Callable[[torch.Tensor, torch.Tensor, bool], Found],
        *,
        count: int,
        stages: Sequence[bool],
        device: torch.device,
    ) -> None:
        self._update, self._stages = update, stages
        self._inputs = torch.zeros(2, count, dtype=torch.int64, device=device)
        self._num_steps = 0
        self._graphs: dict[bool, tuple[torch.cuda.CUDAGraph, Found]] = {}

    def run(self, numbers: Sequence[int], bases: Sequence[int], is_last_stage: bool) -> Found:
        """Take a step."""
        device = self._inputs.device
        self._inputs.copy_(send(torch.tensor([numbers, bases]), device))
        inputs = self._inputs[0], self._inputs[1]
        self._num_steps += 1
        if device.type != "cuda":
            return self._update(*inputs, is_last_stage)
        if self._num_steps <= WARM_STEPS:
            # What is to be recorded must not have run on the stream that everything else waits for.
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                found = self._update(*inputs, is_last_stage)
            torch.cuda.current_stream().wait_stream(stream)
            return found
        if not self._graphs:
            # They never run side by side.
            pool = torch.cuda.graph_pool_handle()
            for stage in self._stages:
                graph = torch.cuda.CUDAGraph()
                with without_collection(), torch.cuda.graph(graph, pool=pool):
                    found = self._update(*inputs, stage)
                self._graphs[stage] = graph, found
        graph, found = self._graphs[is_last_stage]
        graph.replay()
        return found
