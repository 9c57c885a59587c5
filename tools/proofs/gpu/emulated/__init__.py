"""Ranks with values on CUDA devices that do not exist. Import it before torch, see fake_cuda."""

from tools.proofs.gpu import fake_cuda

fake_cuda.load()
