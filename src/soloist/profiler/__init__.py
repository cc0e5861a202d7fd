"""What a step costs and why: recording any PyTorch program, finding what the host waits for, and guards for tests."""

from soloist.profiler.analysis import Analysis, analyse
from soloist.profiler.guards import HostSyncError, allow_host_sync, assert_returns_early, no_host_sync
from soloist.profiler.kineto import load_trace, save_trace
from soloist.profiler.recording import Watch, watch
from soloist.profiler.report import in_words

__all__ = [
    "Analysis",
    "HostSyncError",
    "Watch",
    "allow_host_sync",
    "analyse",
    "assert_returns_early",
    "in_words",
    "load_trace",
    "no_host_sync",
    "save_trace",
    "watch",
]
