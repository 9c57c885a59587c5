"""DualPipe's pair: two microbatches in turns, a layer of each, with the numbers of F then B."""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
import torch
from tiny import GPT2, forward_step, tokens

from megapipe.distributed.axis import Axis, Pending
from megapipe.models.gpt import GPTModel
from megapipe.optim.buffers import FlatBuffers
from megapipe.partition.spans import LayerSpan
from megapipe.pipeline_parallel.stage import PipelineStage
from megapipe.tensor_parallel.rng import Stream, initialize


def two_stages(model, log, tp):
    """First and last half of the model, each with two microbatches; layers write down when they run."""
    stages = []
    for span in (LayerSpan(0, 2, True, False), LayerSpan(2, 2, False, True)):
        gpt = GPTModel(model, span, tp)
        initialize(gpt, 1, tp)
        gpt.buffers = FlatBuffers(dict(gpt.named_parameters()))
        for name, layer in gpt.decoder.layers.items():
            layer.register_forward_hook(lambda *_, name=name: log.append(f"F{name}"))
            layer.register_full_backward_hook(lambda *_, name=name: log.append(f"B{name}"))
        stages.append(
            PipelineStage(
                gpt,
                forward_step,
                iter(tokens(2)),
                holds_loss=span.loss,
                loss_divisor=2,
                per_token=False,
                collect_non_loss_data=False,
                stream=lambda i: Stream(5, i),
                overlaps=True,
            )
        )
    return stages


def two_microbatches(model, overlapped, weights, axis=lambda log: Axis()):
    """0F0 1F0, then 0F1 with 1B0 as a pair or one after the other, then the rest."""
    log = []
    first, last = two_stages(model, log, axis(log))
    last.forward(0, first.forward(0, None))
    log.clear()
    if overlapped:
        x, grad = first.overlapped_forward_backward(1, None, last, 0, None, weights=weights)
    else:
        x, grad = first.forward(1, None), last.backward(0, None, weights=weights)
    order = list(log)
    last.forward(1, x)
    first.backward(0, grad, weights=weights)
    first.backward(1, last.backward(1, None, weights=weights), weights=weights)
    for stage in (first, last):
        for microbatch in () if weights else (0, 1):
            stage.weight(microbatch)
        stage.finish()
    return order, [last.results, *(stage.module.buffers.grads for stage in (first, last))]


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("recompute", [None, "full"])
def test_a_pair_has_the_bits_of_f_then_b(recompute, weights):
    model = replace(GPT2, recompute_granularity=recompute)
    _, (losses, *gradients) = two_microbatches(model, False, weights)
    _, (same, *again) = two_microbatches(model, True, weights)
    assert losses == same
    assert all(torch.equal(a, b) for a, b in zip(gradients, again, strict=True))
    assert all(g.count_nonzero() for g in gradients)


def test_layers_of_both_run_in_turns():
    assert two_microbatches(GPT2, True, True)[0] == ["F0", "B3", "F1", "B2"]
    assert two_microbatches(GPT2, False, True)[0] == ["F0", "F1", "B3", "B2"]


def test_a_model_without_the_method_runs_f_then_b(monkeypatch):
    class Whole(GPTModel):
        between_layers = None

    monkeypatch.setitem(globals(), "GPTModel", Whole)
    assert two_microbatches(GPT2, True, True)[0] == ["F0", "F1", "B3", "B2"]


@dataclass(frozen=True)
class TwoRanks(Axis):
    """Two as far as layers see: what would be summed stays as it is, and the log has when it is waited for."""

    size: int = 2
    log: list[str] = field(default_factory=list)

    def start_all_reduce(self, x, op="sum"):
        self.log.append("start")
        return Pending(x, SimpleNamespace(wait=lambda: self.log.append("wait")))


@pytest.mark.parametrize("overlapped", [True, False])
def test_a_layer_of_the_other_runs_while_a_collective_is_under_way(overlapped):
    order, _ = two_microbatches(GPT2, overlapped, True, lambda log: TwoRanks(log=log))
    for layer in ("B3", "B2"):
        before = order[: order.index(layer)]
        assert before.count("start") - before.count("wait") == overlapped
