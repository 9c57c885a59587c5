"""A batch with fields of one's own reaches the stages that ask for it, and no others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from short_run import config, datasets
from tiny import STYLES

from examples.own_batch import HOOKS, More, forward_step, provider
from megapipe.config import Config
from megapipe.data.build import Datasets
from megapipe.distributed.axis import Axis
from megapipe.errors import ConfigError
from megapipe.flags.parse import parse
from megapipe.partition.spans import LayerSpan
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.training.pretrain import Training, pretrain


def in_float64(config, span, tp):
    return provider(config, span, tp).double()


class Counted(More):
    reads = 0

    def __getitem__(self, sample):
        self.reads += 1
        return super().__getitem__(sample)


def first_step(mesh, config):
    """(weights before, gradients, loss, samples read) of a rank."""
    data = Counted(datasets().train, config.model.hidden)
    training = Training(config, mesh, in_float64, forward_step, Datasets(data, None, None), 127, 0.0, hooks=HOOKS)
    before = {name: p.detach().clone() for name, p in training.run.optimizer.params.items()}
    result = training.driver.whole()
    grads = {name: p.main_grad.clone() for name, p in training.run.optimizer.params.items()}
    return before, grads, result.losses["lm loss"], data.reads


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h2"])
def test_weights_of_the_loss_and_a_vector_in_the_middle_train_as_by_plain_autograd(schedule):
    model = replace(STYLES["llama"], num_layers=4)
    settings = config(model, pp=4, schedule=schedule, clip_grad=0.0)
    datasets()  # before the threads would each make them
    ranks = run_threads(lambda mesh: first_step(mesh, settings), pp=4)
    assert [reads for _, _, _, reads in ranks] == [8, 8, 0, 8]  # layer 1 asks, the stage of layer 2 does not

    whole = in_float64(settings.model, LayerSpan(0, 4, True, True), Axis())
    whole.load_state_dict({name: p for before, *_ in ranks for name, p in before.items()})
    vectors, losses, counts = More([], 32).vectors, [], []
    for first in range(0, 8, 2):
        ids = torch.stack([torch.from_numpy(datasets().train[i]) for i in (first, first + 1)])
        whole.decoder.layers["1"].vector = torch.stack([torch.from_numpy(vectors[i % 4]) for i in (first, first + 1)])
        weight = torch.where(ids[:, 1:] % 2 == 1, 1.25, 0.25)
        losses.append((whole(ids[:, :-1], labels=ids[:, 1:]) * weight).sum())
        counts.append(weight.sum())
    (sum(loss / count for loss, count in zip(losses, counts, strict=True)) / 4).backward()
    assert [loss for _, _, loss, _ in ranks] == pytest.approx([sum(losses).item() / sum(counts).item()] * 4, rel=1e-12)
    found = {name: grad for _, grads, *_ in ranks for name, grad in grads.items()}
    assert found.keys() == dict(whole.named_parameters()).keys()
    for name, p in whole.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=1e-9, atol=1e-12)


FLAGS = (
    "--check --check-paths no --num-layers 2 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --lr 1e-3 "
    "--max-position-embeddings 8 --micro-batch-size 1 --train-iters 1 --tokenizer-type NullTokenizer --vocab-size 15"
)


def test_a_program_that_gives_its_data_sets_names_no_files(capsys):
    """--data-path was asked for, or --mock-data, though nothing would have read either."""
    given = parse(Config, FLAGS.split())
    pretrain(given, provider, forward_step, lambda config, tokenizer: Datasets(More(datasets().train, 8)), HOOKS)
    assert "1 microbatches of 1" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--data-path is missing"):
        pretrain(given, provider, forward_step)
