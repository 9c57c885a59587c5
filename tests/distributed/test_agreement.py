"""Ranks that were started differently all stop, before any group is made, with the difference, its values and ranks."""

from __future__ import annotations

import re
import socket
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from programs import ROOT, Program
from token_files import add_document
from torch.distributed import HashStore

from megapipe.data.indexed import IndexedWriter
from megapipe.distributed.meeting.agreement import agree, taken
from megapipe.errors import ConfigError
from tools.proofs.drawn_starts import Starts
from tools.proofs.shrink import Fuzzer


class Counting(HashStore):
    """A store that counts requests."""

    requests = 0

    def add(self, key, amount):
        self.requests += 1
        return super().add(key, amount)

    def get(self, key):
        self.requests += 1
        return super().get(key)


def meet(*facts: dict[str, str]) -> tuple[list[object], Counting]:
    """What each rank gets: None, or the problems it reads."""
    store = Counting()

    def one(rank: int) -> object:
        try:
            return agree(store, rank, len(facts), facts[rank])
        except ConfigError as error:
            return error.problems

    with ThreadPoolExecutor(len(facts)) as pool:
        return list(pool.map(one, range(len(facts)))), store


def test_equal_ranks_go_on():
    assert meet({"--lr": "1"}, {"--lr": "1"}, {"--lr": "1"})[0] == [None] * 3


def test_ranks_that_share_a_gpu_are_told_by_its_name_before_nccl_waits_for_ever():
    store = HashStore()
    found, _ = meet(*(taken(store, gpu) for gpu in ("GPU-a", "GPU-b", "GPU-b")))
    (said,) = {problem for (problem,) in found}
    assert said == (
        "the GPU (start one rank for each, or compute on the CPU with --distributed-backend gloo) differs between "
        "ranks: its own on rank 0; GPU-b, which is another rank's on rank 2"
    )


def test_every_rank_reads_the_same_difference_with_its_values_and_ranks():
    found, _ = meet(
        {"--lr": "1", "torch": "2.13", "x": "0"},
        {"--lr": "2", "torch": "2.13", "x": "0"},
        {"--lr": "1", "torch": "2.12"},
        {"--lr": "2", "torch": "2.13", "x": "0"},
    )
    assert (
        found
        == [
            (
                "--lr differs between ranks: 1 on ranks 0, 2; 2 on ranks 1, 3",
                "torch differs between ranks: 2.13 on ranks 0, 1, 3; 2.12 on rank 2",
                "x differs between ranks: 0 on ranks 0, 1, 3; nothing on rank 2",
            )
        ]
        * 4
    )


def test_a_hundred_ranks_that_differ_from_the_first_are_few_words():
    (text, more), *_ = meet({"a": "1"}, *({"a": "2"} for _ in range(99)))[0]
    assert text.startswith("a differs between ranks: 1 on rank 0; 2 on ranks ")
    assert len(text) < 140
    assert more == "and 83 more ranks differ from rank 0"


def test_a_rank_asks_a_handful_of_times_however_many_there_are():
    found, store = meet(*({"a": "1"} for _ in range(200)))
    assert found == [None] * 200
    assert store.requests <= 4 * 200


def test_of_twenty_drawn_starts_none_trains_with_a_difference_and_each_is_named():
    """Flags, layouts, files, versions; 1,000 by `python tools/proofs/drawn_starts.py`."""
    starts = Starts()
    fuzzer = Fuzzer("starts", starts.draw, starts.run)
    assert fuzzer.fuzz(3, most=20), fuzzer.found
    assert len(starts.kinds) > 3


# Processes without a launcher, each in a folder of its own as on machines with disks of their own.
PROGRAM = """
import os, sys
sys.path.insert(0, os.environ["ROOT"])
rank = os.environ["RANK"]
import torch
if rank == "1":
    torch.__version__ = "2.12.1"  # what a machine with another wheel would say
from pretrain_gpt import main
main([*sys.argv[1:], "--tensor-model-parallel-size" if rank == "1" else "--pipeline-model-parallel-size", "2"])
"""
FLAGS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 "
    "--data-path data_text_document --tokenizer-type NullTokenizer --vocab-size 127 --split 1,0,0 --micro-batch-size 1 "
    "--global-batch-size 2 --train-iters 3 --lr 1e-3 --num-workers 0 --distributed-timeout-minutes 3"
)


def test_ranks_of_other_sizes_data_and_torch_all_stop_at_once(tmp_path):
    """tp 2 on one rank and pp 2 on the other waited for the whole timeout; other tokens under one name trained."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank, lengths in enumerate(((60, 50), (50, 60))):
        folder = tmp_path / str(rank)
        with IndexedWriter(folder / "data_text_document", np.uint16) as writer:
            for length in lengths:
                add_document(writer, [1] * length)
        env = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        env |= {"MASTER_PORT": str(port), "ROOT": str(ROOT)}
        (folder / "main.py").write_text(PROGRAM)
        started.append(Program([folder / "main.py", *FLAGS.split()], tmp_path / f"{rank}.log", env, cwd=folder))
    for process in started:
        code, text = process.wait(), process.log.read_text()
        assert code == 2, text
        found = re.findall(r"^ +(.*) differs between ranks: (\S+) on rank 0; (\S+) on rank 1$", text, re.M)
        assert [name for name, *_ in found if not name.startswith("the schedule")] == [
            "--pipeline-model-parallel-size",
            "--tensor-model-parallel-size",
            "data_text_document.idx (SHA-256)",
            "torch",
        ], text
        assert ("torch", torch.__version__, "2.12.1") in found
        assert "Traceback" not in text
