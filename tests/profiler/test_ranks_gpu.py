"""Two live ranks under the profiler: the one that was made late is named, with the line that makes it so."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).parent / "ranks_program.py"
SOLOIST = [sys.executable, "-c", "import sys; from soloist.cli import main; sys.exit(main(sys.argv[1:]))"]
# Seconds that the ranks may take to meet, and steps of about 2 ms behind which a recording has long ended.
MEETING_S, NUM_STEPS = 6, 7000


def marked_line(mark: str) -> str:
    lines = PROGRAM.read_text(encoding="utf-8").splitlines()
    return f"{PROGRAM.name}:{next(i + 1 for i, line in enumerate(lines) if line.endswith(f'# {mark}'))}"


@pytest.mark.timeout(300)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("late_rank", [0, 1])
def test_the_late_one_of_two_live_ranks_is_named_with_its_line(late_rank: int, tmp_path: Path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    words = ["profile", "--after", str(MEETING_S), "--save", str(tmp_path / "rank{rank}.json.gz"), "--"]
    program = ["python", str(PROGRAM)]
    ranks = [
        subprocess.Popen(
            [*SOLOIST, *words, *program, str(rank), str(tmp_path / "store"), str(late_rank), str(NUM_STEPS)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(text[-2000:] for text in said)
    files = [str(tmp_path / f"rank{rank}.json.gz") for rank in range(2)]
    done = subprocess.run(
        [*SOLOIST, "profile", "--json", "--trace", *files], env=environment, capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(found["ranks"]))
    assert found["ranks"]["late_rank"] == late_rank and found["ranks"]["num_collectives"] > 100
    assert found["ranks"]["waited_us"] > 100
    late = next(process for process in found["processes"] if process["rank"] == late_rank)
    hosts = [gap["place"]["where"].split("/")[-1] for gap in late["gaps"] if gap["kind"] == "host"]
    assert hosts[:1] == [marked_line("late")], late["gaps"][:3]
    for process in found["processes"]:
        waits = {wait["place"]["where"].split("/")[-1] for wait in process["waits"] if wait["count"] >= 0.5}
        assert waits == {marked_line("read")}, process["waits"]
