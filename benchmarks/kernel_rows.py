"""Times of operators by width, each against its floor: what the parts of `kernels.py` measure, and the file they share.

Floors are bytes over the largest read bandwidth that the run has measured, so they are set when the file is written.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from soloist.bench.results import RESULTS, device_name, machine_folder, make_stamp
from soloist.roofline import measure_bandwidth

# Rows of a step, and tokens in the cache before it.
WIDTHS = (1, 4, 9, 16)
CONTEXT_LEN = 8192
# Largest relative RMS errors of what comes out of an operator, and of a recurrent state.
MAX_ERROR, MAX_STATE_ERROR = 2e-2, 1e-4


def error(out: torch.Tensor, ref: torch.Tensor) -> float:
    """Relative RMS error."""
    assert torch.isfinite(out).all()
    return ((out.float() - ref.float()).norm() / ref.float().norm()).item()


class KernelRows:
    """The rows of one run.

    Args:
        device: that is measured.
        folder: of the file. None: that of this kind of machine.
        commit: of what is measured.
    """

    def __init__(self, device: torch.device, folder: Path | None, commit: str | None) -> None:
        self.device, self.folder, self.commit = device, folder, commit
        self.bandwidth = 0.0
        self.rows: list[dict[str, Any]] = []
        # Why what was asked for is not there, by its name.
        self.not_measured: dict[str, str] = {}
        self.measure_bandwidth()

    def measure_bandwidth(self) -> None:
        """Measure the read bandwidth; the largest one counts."""
        self.bandwidth = max(self.bandwidth, measure_bandwidth(self.device))

    def check(self, name: str, T: int, out_error: float, state_error: float = 0.0) -> None:
        """Refuse to time what does not equal its reference."""
        print(f"check {name:36s} T={T:<5d} out {out_error:.2e} state {state_error:.2e}", flush=True)
        assert out_error < MAX_ERROR and state_error < MAX_STATE_ERROR, name

    def add(self, shape: str, operator: str, T: int, us: tuple[float, float], num_bytes: float, **more: float) -> None:
        """Put down what one operator took.

        Args:
            shape: whose sizes it had.
            operator: its name.
            T: tokens.
            us: median and spread.
            num_bytes: that it must move.
            more: other figures of the row, such as a peer's.
        """
        row = {"shape": shape, "operator": operator, "width": T, "kernel_us": round(us[0], 2)}
        self.rows.append(row | {"spread_us": round(us[1], 2), "bytes": round(num_bytes)} | more)
        floor_us = num_bytes / self.bandwidth / 1e3
        print(
            f"{shape:12s} {operator:34s} T={T:<5d} {us[0]:8.2f} us  floor {floor_us:7.2f}  {floor_us / us[0]:6.1%}"
            + "".join(f"  {name} {value:.2f}" for name, value in more.items()),
            flush=True,
        )

    def write(self) -> Path:
        """Write all rows so far, with when, where and of what version."""
        name = device_name(self.device)
        result = make_stamp() | {
            "commit": self.commit,
            "case": "kernels",
            "command": " ".join(["python", *sys.argv]),
            "device": name,
            "dtype": "bfloat16",
            "context_len": CONTEXT_LEN,
            "bandwidth_gb_per_s": round(self.bandwidth),
            "rows": [self._priced(row) for row in self.rows],
        }
        if self.not_measured:
            result["not_measured"] = self.not_measured
        path = (self.folder or RESULTS / machine_folder(name, 1)) / "kernels.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        return path

    def _priced(self, row: dict[str, Any]) -> dict[str, Any]:
        floor_us = row["bytes"] / self.bandwidth / 1e3
        return row | {"floor_us": round(floor_us, 2), "share_of_floor": round(floor_us / row["kernel_us"], 3)}
