"""x"""
from __future__ import annotations
import random, sys, time, traceback
from dataclasses import replace
from functools import partial
from tools.proofs.gpu import fake_cuda
fake_cuda.load()
import torch
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.plan import sharing
from tools.proofs.equivalence import train, differences, differing_bits
from tools.proofs.equivalence_case import Case, table
from tools.proofs.gpu.emulated.ranks import devices, run_ranks

def on_devices(case, late=True):
    sizes = {axis: getattr(case, axis) for axis in ("tp", "cp", "dp", "pp", "ep", "etp")}
    shares = sharing(table(case).placement, tied=case.tied)
    with devices(late=late) as lib:
        ranks = run_ranks(partial(train, case=case), **sizes, shares=shares, timeout_s=60,
                          extra_links=int(case.vocabulary))
        return ranks, lib.faults()

if __name__ == "__main__":
    torch.set_num_threads(1)
    case = Case("1f1b", 2, 4, (1, 1))
    ranks, faults = on_devices(case)
    print(faults[:5], differences(case, ranks))
