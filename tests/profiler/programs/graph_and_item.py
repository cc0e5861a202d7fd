"""Replays one graph per step and reads the token behind it."""

import sys

import torch
from gpu_work import Work, steps

work = Work()
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    for _ in range(3):
        work.step()
stream.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    token = work.step()
total = 0
for _ in steps():
    graph.replay()
    if sys.argv[2:] != ["without"]:
        total += int(token)  # fault
