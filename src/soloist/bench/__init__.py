"""The benchmark: requests under a stopwatch, steps against their floor, engines beside each other."""

from soloist.bench.floor import FloorSettings, price
from soloist.bench.local import Measurement, Rung, measure, measure_ladder
from soloist.bench.results import Peer, Result, write_result
from soloist.bench.workloads import make_workload

__all__ = [
    "FloorSettings",
    "Measurement",
    "Peer",
    "Result",
    "Rung",
    "make_workload",
    "measure",
    "measure_ladder",
    "price",
    "write_result",
]
