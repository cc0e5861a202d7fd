"""Waits for everything, two functions deep."""

import torch
from gpu_work import Work, has_fault, steps


class Timer:
    def stop(self) -> None:
        torch.cuda.synchronize()  # fault


work, timer = Work(), Timer()
for _ in steps():
    work.step()
    if has_fault():
        timer.stop()
