"""Replays one graph per step and reads the token behind it."""

import torch
from gpu_work import Work, has_fault, steps

work = Work()
# What is captured must have run before.
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    for _ in range(3):
        work.step()
stream.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    token = work.step()
# Of the tokens, on the host.
total = 0
for _ in steps():
    graph.replay()
    if has_fault():
        total += int(token)  # fault
