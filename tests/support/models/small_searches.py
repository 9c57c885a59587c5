"""Searches of the best plan of a small model."""

import json

from megapipe.commands.plan.main import main
from megapipe.commands.plan.search.judged.found import SearchResults
from megapipe.commands.plan.search.listed.asked import SearchRestrictions
from megapipe.commands.plan.search.listing import best_of
from megapipe.commands.plan.search.report import UserPlan, report
from megapipe.commands.plan.search.search import search
from megapipe.commands.plan.verdict import Machine
from megapipe.config import Config
from megapipe.flags.parse import parse
from megapipe.plan import GIB
from megapipe.plan.seconds.device import Device

MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 1 --train-iters 9 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 1000 "
    "--bf16 "
)
SLOW = Device(flops=1e11, inside=1e9, outside=1e8, latency=1e-5, overhead=1e-5, node=2)


def found_by(
    flags: str, gpus: int, memory: float = GIB, device: Device = SLOW, *without: str, **axes: str
) -> SearchResults:
    """Return what a search finds without tables of zb-auto, which take two thirds of its time.

    Args:
        memory: bytes of a device.
        without: more words of --without.
        axes: the only value of an axis, as tp="2".
    """
    asked = SearchRestrictions(
        {axis: frozenset([value]) for axis, value in axes.items()}, frozenset(["zb-auto", *without])
    )
    return search(parse(Config, [*MODEL.split(), *flags.split()]), gpus, Machine(memory), device, 1000, asked=asked)


def page_of(found: SearchResults, machine: Machine, device: Device | None = None, yours: UserPlan | None = None) -> str:
    """Return the page of a search's plans."""
    return report(found, best_of(found), machine, device, yours)


def run_search(words, capsys, tmp_path, without="zb-auto"):
    """Run plan --search as a user does; return its list of plans and what it prints."""
    out = tmp_path / "plans.json"
    left_out = f"--without {without}" if without else ""
    main(f"{MODEL} --search {words} {left_out} --json {out}".split())
    return json.loads(out.read_text())["plans"], capsys.readouterr()
