"""`soloist doctor`: what this machine can do."""

import dataclasses
import json

import typer

from soloist.cli.options import Debug, Json


def doctor(as_json: Json = False, debug: Debug = False) -> None:
    """Say what this machine is and what works on it; measures its memory bandwidth."""
    from soloist.doctor import inspect_machine

    machine = inspect_machine()
    if as_json:
        facts = dataclasses.asdict(machine) | {"capabilities": machine.capabilities}
        facts["sharing"] = [
            dataclasses.asdict(estimate) | {"sharing": estimate.sharing.value, "advice": estimate.in_words}
            for estimate in machine.sharing
        ]
        typer.echo(json.dumps(facts))
        return
    lines = {
        "soloist": machine.soloist,
        "system": f"{machine.system}, Python {machine.python}",
        "PyTorch": f"{machine.torch}, {f'CUDA {machine.cuda}' if machine.cuda else 'CPU build'}",
        "Triton": machine.triton or "not installed",
        "CPU": f"{machine.cpu}, {machine.num_threads} threads, {machine.cpu_capability}",
        "machine code": machine.cpu_machine_code or "none for this CPU and system",
        "memory": f"{machine.memory_gib:.1f} GiB, {machine.free_memory_gib:.1f} GiB free",
        "bandwidth": f"{machine.bandwidth_gb_per_s:.1f} GB/s read, measured with {machine.num_threads} threads",
    }
    for i, gpu in enumerate(machine.gpus):
        lines[f"GPU {i}"] = (
            f"{gpu.name}, compute capability {gpu.compute_capability}, {gpu.memory_gib:.1f} GiB, "
            f"{gpu.free_memory_gib:.1f} GiB free, {gpu.bandwidth_gb_per_s:.0f} GB/s read"
        )
    lines["--device auto"] = machine.default_device
    lines |= machine.capabilities | {f"  {estimate.model}": estimate.in_words for estimate in machine.sharing}
    width = max(map(len, lines))
    for name, value in lines.items():
        typer.echo(f"{name:<{width}}  {value}")
