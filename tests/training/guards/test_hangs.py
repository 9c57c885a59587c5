"""Ranks that are killed, stopped, skip a message or lose step: what the others say, and that nothing stays behind.

The short timeout counts from the second iteration on, so that a slow start of the processes is no fault.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from programs import ROOT, Program, start_ranks

TIMEOUT_S = 6
FLAGS = (
    "--num-layers 12 --hidden-size 16 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--mock-data --split 1,0,99 --tokenizer-type NullTokenizer --vocab-size 127 --num-workers 0 --micro-batch-size 1 "
    "--global-batch-size 8 --train-iters 10000 --lr 1e-3 --log-interval 1 --eval-iters 0 "
    f"--distributed-timeout-minutes 1 --distributed-timeout-seconds-after-init {TIMEOUT_S}"
)
LINE = r"^megapipe: rank (\d) \(pipeline rank \d, stage \d\) is in (.+?)(?:, waits (.+))?, since ([\d.]+) s: (.*)$"


def processes(folder: Path, ranks: Sequence[Program]) -> dict[int, str]:
    """State (T: stopped) of each living process of a run, launcher included."""
    found, known = {}, {rank.pid for rank in ranks}
    for entry in Path("/proc").iterdir():
        try:
            named = entry.name.isdigit() and str(folder).encode() in (entry / "cmdline").read_bytes().split(b"\0")
            if named or (entry.name.isdigit() and int(entry.name) in known):
                found[int(entry.name)] = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            pass  # it ended meanwhile
    return {pid: state for pid, state in found.items() if state != "Z"}


def run(fault: str, ranks: int, folder: Path, torchrun: bool = False, pp: int | None = None) -> tuple[int, str, float]:
    """Exit status, all output, and seconds from the fault to the end (stop: to the diagnosis). Leaves no process.

    Args:
        pp: pipeline ranks, by default all.
    """
    (folder / "flags").write_text(f"{FLAGS} --pipeline-model-parallel-size {ranks if pp is None else pp}")
    program = [ROOT / "tests" / "support" / "faulty.py", fault, folder]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", ranks]
    started = [Program([*launcher, *program], folder / "rank-0")] if torchrun else start_ranks(ranks, program, folder)
    until, ended = time.monotonic() + 90, 0.0
    try:
        while any(process.poll() is None for process in started):
            assert time.monotonic() < until, f"does not end:\n{printed(started)}"
            time.sleep(0.1)
            if not ended and "first mismatch" in printed(started):
                ended = time.time()
                # A launcher would give a stopped rank half a minute more to hear it.
                for pid in [pid for pid, state in processes(folder, started).items() if state == "T"]:
                    os.kill(pid, signal.SIGKILL)
        while fault == "orphan" and processes(folder, started) and time.monotonic() < until:
            time.sleep(0.1)
        assert processes(folder, started) == {}, printed(started)
    finally:
        for pid in processes(folder, started):
            os.kill(pid, signal.SIGKILL)
    code = next((process.wait() for process in started if process.wait() != -signal.SIGKILL), 0)
    return code, printed(started), (ended or time.time()) - float((folder / "time").read_text())


def printed(started: Sequence[Program]) -> str:
    return "".join(process.log.read_text() for process in started if process.log.exists())


def lines(text: str) -> dict[int, tuple[str, str]]:
    """Rank -> (where it is, what it waits for, if it does not just send); each has said it once."""
    found = re.findall(LINE, text, re.M)
    assert len(found) == len({rank for rank, *_ in found}), text
    assert all(float(since) < TIMEOUT_S + 3 for *_, since, _ in found), text
    return {int(rank): (place, waits) for rank, place, waits, *_ in found}


def mismatch(text: str) -> str:
    (found,) = re.findall("^megapipe: first mismatch: (.*)$", text, re.M)
    return str(found)


def test_a_message_that_is_skipped_is_named_with_the_rank_that_never_sent_it(tmp_path):
    code, text, seconds = run("skip", 3, tmp_path)
    said = lines(text)
    assert said[2] == ("pass 2F2 of iteration 3", "for 1F2 from rank 1"), text
    assert sorted(said) == [0, 1, 2]
    assert re.fullmatch(
        r"rank 1 is in pass 1BW\d of iteration 3 and never sent 1F2 to rank 2; ranks 0 and 2 wait for it",
        mismatch(text),
    ), text
    assert code != 0
    assert seconds < TIMEOUT_S + 12


@pytest.mark.parametrize("fault, ranks, limit_s", [("kill", 2, 12), ("stop", 3, TIMEOUT_S + 12)])
def test_a_rank_that_is_killed_or_stopped_is_named_with_what_the_others_wait_for(fault, ranks, limit_s, tmp_path):
    code, text, seconds = run(fault, ranks, tmp_path, torchrun=fault == "kill")
    said, last, gone = lines(text), ranks - 1, ranks - 2
    place, waits = said[last]
    if waits or fault == "stop":
        assert (place, waits) == (f"pass {last}F2 of iteration 3", f"for {gone}F2 from rank {gone}"), text
    else:
        # On a busy machine it hears of the kill while it still computes on what had come before.
        assert re.fullmatch(rf"pass {last}(F|BW)[01] of iteration 3", place), text
    assert said.keys() == set(range(ranks)) - {gone}, text
    waiting = {f"rank {rank} waits {waits}" for rank, (_, waits) in said.items() if waits.endswith(f"rank {gone}")}
    assert mismatch(text).startswith(f"rank {gone} does not answer: killed, stopped or cut off; "), text
    assert set(mismatch(text).split("; ")[1:]) == waiting
    assert code != 0
    assert seconds < limit_s


def test_a_stopped_data_parallel_rank_is_named_and_not_the_one_that_waits_for_it(tmp_path):
    """Of two sums that wait, gloo tells the second in words without its name: taken for an error of the rank's own."""
    code, text, seconds = run("halt", 2, tmp_path, pp=1)
    assert mismatch(text) == "rank 1 does not answer: killed, stopped or cut off", text
    assert lines(text).keys() == {0}, text
    assert code != 0
    assert seconds < TIMEOUT_S + 12


def test_ranks_whose_launcher_is_killed_end_and_say_so_each_in_one_line(tmp_path):
    """They trained on, and a restart would have shared the folder of checkpoints with them."""
    _, text, seconds = run("orphan", 2, tmp_path, torchrun=True)
    said = re.findall(
        r"^megapipe: (rank \d) .*; its launcher has ended; any checkpoint saved before is complete$", text, re.M
    )
    assert sorted(said) == ["rank 0", "rank 1"], text
    assert len(re.findall("^megapipe: ", text, re.M)) == 2, text
    assert seconds < 10


def test_a_rank_ahead_in_the_data_stops_all_before_the_update(tmp_path):
    code, text, _ = run("ahead", 2, tmp_path)
    assert (
        "faulty.py: error: the ranks are at different places of the data: rank 0 at sample 24, rank 1 at sample 16. "
        "Nothing was updated; start again from the last checkpoint with --load.\n"
    ) in text
    assert f'File "{ROOT}/megapipe' not in text
    assert " iteration        2/" in text
    assert " iteration        3/" not in text
    assert code != 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_ctrl_c_ends_in_one_line(ranks, tmp_path):
    code, text, _ = run("interrupt", ranks, tmp_path, torchrun=ranks > 1)
    assert re.findall("^megapipe: .*$", text, re.M) == [
        "megapipe: interrupted after iteration 2; any checkpoint saved before is complete"
    ], text
    assert f'File "{ROOT}/megapipe' not in text
    assert code == (130 if ranks == 1 else 1)  # the launcher's own
