"""Waits through the CUDA driver, whose calls PyTorch's profiler does not record."""

import ctypes

from gpu_work import Work, has_fault, steps

driver = ctypes.CDLL("libcuda.so.1")
work = Work()
for _ in steps():
    work.step()
    result = driver.cuCtxSynchronize() if has_fault() else 0  # fault
