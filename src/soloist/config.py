"""What the environment says. The only reader of environment variables besides the reference switch of the kernels.

Read on every call: nothing is kept, so a test or a long-lived process may change a variable.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The environment at one moment."""

    # SOLOIST_DEBUG: show tracebacks.
    debug: bool
    # SOLOIST_OFFLINE or HF_HUB_OFFLINE: never use the network.
    offline: bool
    # $XDG_CACHE_HOME/soloist, by default ~/.cache/soloist. Everything in it may be deleted at any time.
    cache_dir: Path
    # SOLOIST_MODELS_DIR: a folder of model files, searched before the cache. None: only the cache is searched.
    models_dir: Path | None
    # SOLOIST_API_KEY: what clients of the server must send, unless --api-key says. None: nothing.
    api_key: str | None
    # CC: the C compiler that Triton calls. None: it looks for gcc, then for clang.
    c_compiler: str | None

    @classmethod
    def read(cls) -> Self:
        """Read every variable now."""
        models_dir = os.environ.get("SOLOIST_MODELS_DIR")
        # The XDG rule: a relative path is invalid and ignored.
        xdg_cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
        cache_home = xdg_cache if xdg_cache.is_absolute() else Path.home() / ".cache"
        return cls(
            debug=_is_set("SOLOIST_DEBUG"),
            offline=_is_set("SOLOIST_OFFLINE") or _is_set("HF_HUB_OFFLINE"),
            cache_dir=cache_home / "soloist",
            models_dir=Path(models_dir).expanduser() if models_dir else None,
            api_key=os.environ.get("SOLOIST_API_KEY") or None,
            c_compiler=os.environ.get("CC") or None,
        )


def _is_set(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() not in ("", "0", "false", "no", "off")


def forbid_telemetry() -> None:
    """Tell packages that would report their use to somebody not to, unless the environment says otherwise."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def user_cache_dir() -> Path:
    """Give the folder for what may be deleted at any time; it need not exist yet."""
    return Environment.read().cache_dir


def model_dirs() -> tuple[Path, ...]:
    """Give the folders that are searched for model files, first one first; the last is where fetched files go."""
    environment = Environment.read()
    cache = environment.cache_dir / "models"
    return (cache,) if environment.models_dir is None else (environment.models_dir, cache)


def is_offline() -> bool:
    """Say whether the network must not be used."""
    return Environment.read().offline


def disable_multicast() -> None:
    """Keep NCCL and PyTorch from setting up NVLink multicast; called before either connects this process to others."""
    os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


def disable_nccl_watchdog() -> None:
    """Keep PyTorch from ending this process by a signal where a peer is lost; called before NCCL connects it to others.

    Whoever starts ranks sees to their end, and says what happened.
    """
    names = ("ASYNC_ERROR_HANDLING", "ENABLE_MONITORING", "DUMP_ON_TIMEOUT", "RETHROW_CUDA_ERRORS")
    os.environ |= {f"TORCH_NCCL_{name}": "0" for name in names}


def take_profiler_down() -> None:
    """Have PyTorch's profiler take CUPTI out of this process behind a trace; called before one begins.

    Else every later replay of a graph costs the host 0.5 us a node, and a step of it 0.6 % more.
    """
    os.environ.setdefault("TEARDOWN_CUPTI", "1")
