"""Waits through the CUDA driver, whose calls PyTorch's profiler does not record."""

import ctypes

from gpu_work import Work, steps

driver = ctypes.CDLL("libcuda.so.1")
work = Work()
for _ in steps():
    work.step()
    driver.cuCtxSynchronize()  # fault
