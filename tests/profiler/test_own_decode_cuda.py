"""Our own steady decode under the profiler, as a CI job would hold it: no wait, and a planted one fails the job."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).parent / "own_decode.py"
# Seconds that loading and compiling may take, and seconds of decoding behind them.
STARTUP_S, DECODE_S = 20, 8


@pytest.mark.skipif(not torch.cuda.is_available(), reason="waits are a GPU's")
@pytest.mark.parametrize(("words", "exit_code"), [([], 0), (["item"], 4)], ids=["as it is", "with a planted item"])
def test_steady_decoding_waits_for_nothing_and_a_planted_read_fails_the_job(words: list[str], exit_code: int):
    soloist = [sys.executable, "-c", "import sys; from soloist.cli import main; sys.exit(main(sys.argv[1:]))"]
    profile = ["profile", "--json", "--after", str(STARTUP_S), "--fail-on", "syncs>0", "--"]
    program = ["python", str(PROGRAM), str(STARTUP_S + DECODE_S), *words]
    done = subprocess.run(
        [*soloist, *profile, *program],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == exit_code, done.stderr[-3000:]
    (process,) = json.loads(done.stdout.splitlines()[-1])["processes"]
    print(json.dumps({key: process[key] for key in ("origin", "num_steps", "step_ms", "idle_share", "syncs_per_step")}))
    assert process["origin"] == "repetition" and process["num_steps"] > 20
    lines = PROGRAM.read_text(encoding="utf-8").splitlines()
    fault = next(i + 1 for i, line in enumerate(lines) if line.endswith("# fault"))
    waits = [(wait["place"]["where"].split("/")[-1], wait["count"]) for wait in process["waits"]]
    assert waits == ([(f"{PROGRAM.name}:{fault}", 1.0)] if words else [])
