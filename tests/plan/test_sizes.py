"""Sizes that a plan counts, against those of a run, and what a pass needs only while it runs."""

from dataclasses import replace

import pytest
import torch
from tiny import STYLES
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megapipe.config import Config
from megapipe.distributed.axis import Axis
from megapipe.flags.parse import parse
from megapipe.library.runs import check, make_plan
from megapipe.models.provider import gpt_provider
from megapipe.optim.buffers import FlatBuffers
from megapipe.partition.spans import LayerSpan
from megapipe.plan import pieces, sizes
from megapipe.schedule import Costs, build, simulate
from megapipe.tensor_parallel import fused_cross_entropy
from megapipe.tensor_parallel import pieces as parts_of_products


def test_a_plan_counts_the_sizes_of_a_run():
    assert sizes.KEPT_ELEMENTS == fused_cross_entropy.KEPT_ELEMENTS
    assert sizes.BLOCK_ELEMENTS_GPU == fused_cross_entropy.BLOCK_ELEMENTS_GPU
    assert sizes.PIECES == parts_of_products.PIECES


@pytest.mark.parametrize("factor, says", [(0.25, "drops 75.0% of the choices"), (1.25, None)])
def test_a_capacity_below_an_even_load_says_what_it_drops(factor, says):
    flags = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
        "--num-experts 4 --expert-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 4 --train-iters 9 "
        "--lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 1000 --world-size 2 "
        f"--moe-expert-capacity-factor {factor}"
    )
    said = check(parse(Config, flags.split()))
    assert "experts: 2 of 4 on a rank" in said
    if says:
        assert says in said
    else:
        assert "drops" not in said


class Live(TorchDispatchMode):
    """The most bytes of all storages that exist together after an operation."""

    def __init__(self, *before: torch.Tensor) -> None:
        super().__init__()
        self.seen, self.peak = {}, 0
        self.note(before)

    def note(self, tensors):
        for storage in (x.untyped_storage() for x in tensors if isinstance(x, torch.Tensor)):
            if storage._cdata not in self.seen or self.seen[storage._cdata][0].expired():
                self.seen[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, sum(size for ref, size in self.seen.values() if not ref.expired()))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.note(tree_leaves(out))
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_needs_what_the_plan_counts_while_it_runs(dtype):
    """Its logits beside the softmax: counted operation by operation. A twentieth was more than the plan had said."""
    model = replace(STYLES["llama"], hidden_size=32, num_attention_heads=4, padded_vocab_size=8192, hidden_dropout=0.0)
    stage = gpt_provider(model, LayerSpan(4, 0, False, True), Axis()).to(dtype)
    for param in stage.parameters():
        torch.nn.init.normal_(param, std=0.02)
    FlatBuffers(dict(stage.named_parameters()))
    x = torch.randn(512, 2, 32, dtype=dtype, requires_grad=True)
    stage.set_input_tensor(x)
    labels = torch.zeros(2, 512, dtype=torch.long)
    with Live(x) as live:
        stage(labels=labels).sum().backward()
    head = pieces(model, 512, 2, element_bytes=dtype.itemsize).head
    assert head.held + head.passing == pytest.approx(live.peak, rel=0.02)


@pytest.mark.parametrize("name, held", [("gpipe", 4), ("1f1b", 1)])
def test_what_a_pass_needs_for_itself_adds_to_the_peak_once(name, held):
    """However many microbatches a rank holds."""
    time = simulate(build(name, 2, 4), Costs(mem_b=(3.0, 3.0), mem_w=0.0, mem_p=(0.0, 0.5)))
    assert time.peak[1] == 3.0 * held + 0.5


def test_a_limit_leaves_room_for_what_a_pass_needs_for_itself():
    """A searched table within it is not refused by its own plan."""
    flags = (
        "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 256 --max-position-embeddings 256 "
        "--vocab-size 8191 --micro-batch-size 1 --global-batch-size 8 --train-iters 9 --lr 1e-3 --mock-data "
        "--tokenizer-type NullTokenizer --pipeline-model-parallel-size 2 --world-size 2 --pipeline-schedule zb-auto"
    )
    usual = max(make_plan(parse(Config, flags.split())).peak_bytes)
    for factor in (1.02, 1.1, 1.3):
        limit = usual * factor
        limited = make_plan(parse(Config, [*flags.split(), "--memory-limit-gib", f"{limit / 2**30:.9f}"]))
        assert max(limited.peak_bytes) <= limit * (1 + 1e-6)
