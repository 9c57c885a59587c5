"""Test any model provider, in one line under pytest.

    def test_my_provider():
        check_provider(my_provider, ModelConfig(num_layers=4, hidden_size=32, ...))

The oracle is the unsplit model in float64: the stages together must compute what it computes.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.checkpoint.save_load import load_checkpoint, save_checkpoint
from megapipe.config import Config, ModelConfig
from megapipe.data.loader import Batch, make_batch
from megapipe.distributed.axis import Axis
from megapipe.distributed.layout import Layout, layout_of
from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import CheckpointError
from megapipe.models.build import build_stage
from megapipe.models.provider import Provider, stage_provider
from megapipe.partition.spans import nearly_even, spans
from megapipe.pipeline_parallel.engine import ForwardBackward
from megapipe.pipeline_parallel.loss import ForwardStep
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.schedule import SCHEDULES, Schedule, build

RANKS = 2
MICROBATCHES = 4
BATCH = 2
TOLERANCE = 1e-9
"""Tolerance of float64 numbers, relative to the largest number of a tensor."""
# A softmax does not change if one number is added to all of its inputs. So the bias of keys has the
# gradient 0, and what remains is rounding, for which a relative tolerance has no measure.
ROUNDING = 1e-13
"""Tolerance of gradients that are 0, relative to the largest gradient of the model."""


def check_provider(
    provider: Provider,
    model: ModelConfig,
    *,
    schedules: Sequence[str] = tuple(SCHEDULES),
    tensor_parallel: int = 1,
    seq_length: int = 8,
    forward_step: ForwardStep | None = None,
) -> None:
    """Compare a provider's model on two pipeline ranks with the same model in one piece.

    Losses and gradients must be equal under every schedule, and a checkpoint of the whole model
    must load into the stages. Takes seconds; the ranks are threads on the CPU.

    Args:
        provider: builds the stages, with our signature or Megatron's.
        model: a small configuration with padded_vocab_size; dropout is set to 0.
        schedules: names of the schedules.
        tensor_parallel: also split every layer over this number of ranks.
        seq_length: tokens of a sequence.
        forward_step: (data_iterator, model) -> (output, loss_func). None: the loss is the sum over
            all tokens.
    Raises: AssertionError with one line for each loss, gradient or weight that differs.
    """
    assert model.padded_vocab_size is not None, "give padded_vocab_size"
    # A provider may draw masks from torch's global generator, whose order depends on the split.
    model = replace(model, attention_dropout=0.0, hidden_dropout=0.0)
    case = _Case(provider, model, seq_length, forward_step or _forward_step)
    whole = case.run(build("gpipe", 1, MICROBATCHES), ProcessMesh.single())
    problems = []
    for name in schedules:
        ranks = run_threads(
            partial(case.run, build(name, RANKS, MICROBATCHES)), tp=tensor_parallel, pp=RANKS
        )
        problems += [f"{name}: {line}" for line in _differences(whole, ranks, tensor_parallel)]
    problems += case.round_trip()
    assert not problems, "\n".join(["the pieces are not the whole:", *problems])


@dataclass(frozen=True)
class _Result:
    """The outcome of one rank.

    Attributes:
        losses: by microbatch.
        params: (layout, initial weight, gradient) of each parameter, by name.
        tp_rank: the rank's position along tensor parallelism.
    """

    losses: list[float]
    params: dict[str, tuple[Layout, Tensor, Tensor | None]]
    tp_rank: int


@dataclass(frozen=True)
class _Case:
    """A model to test: `run` runs a step of it, `round_trip` tests its checkpoints.

    Attributes:
        provider: builds the stages.
        model: the configuration.
        seq_length: tokens of a sequence.
        forward_step: (data_iterator, model) -> (output, loss_func).
    """

    provider: Provider
    model: ModelConfig
    seq_length: int
    forward_step: ForwardStep

    def run(self, schedule: Schedule, mesh: ProcessMesh) -> _Result:
        """Return the losses and gradients of one step on this rank. No optimizer runs."""
        own = schedule.placement.stages_on(mesh.pp.rank)
        modules = self.stages(mesh, schedule)
        # Copied before the step: initial weights are compared, too.
        before = {name: param.detach().clone() for name, param in _named(modules)}
        # Every rank draws the whole batch, and so the same one.
        draw = torch.Generator().manual_seed(7)
        shape = (MICROBATCHES, BATCH, self.seq_length + 1)
        tokens = torch.randint(0, self.model.padded_vocab_size or 1, shape, generator=draw)
        iterators: list[Iterator[Batch] | None] = []
        for stage in own:
            steps = schedule.ranks[mesh.pp.rank]
            order = [
                p.microbatch
                for step in steps
                for p in step
                if p.kind.is_forward and p.stage == stage
            ]
            # Megatron's contract: stages between the ends have no data iterator.
            ends = schedule.placement.is_first(stage) or schedule.placement.is_last(stage)
            iterator = None
            if ends:
                iterator = map(make_batch, tokens[order])
            iterators.append(iterator)
        reported = ForwardBackward(mesh, schedule, config=self.model)(
            forward_step_func=self.forward_step,
            data_iterator=iterators,
            model=modules,
            num_microbatches=MICROBATCHES,
            seq_length=self.seq_length,
            micro_batch_size=BATCH,
        )
        losses = [float(next(iter(result.values()))) for result in reported]
        params = {name: (layout_of(p), before[name], p.grad) for name, p in _named(modules)}
        return _Result(losses, params, mesh.tp.rank)

    def stages(self, mesh: ProcessMesh, schedule: Schedule, *, seed: int = 1) -> list[nn.Module]:
        """Return the stages of a rank under a schedule, in float64. seed: of the initial values."""
        counts = nearly_even(self.model.layers, schedule.placement.chain)
        own = [
            spans(counts, schedule.placement)[stage]
            for stage in schedule.placement.stages_on(mesh.pp.rank)
        ]
        provider = stage_provider(self.provider, own)
        return [build_stage(provider, self.model, span, mesh.tp, seed).double() for span in own]

    def round_trip(self) -> list[str]:
        """Save the whole model, load it into two stages, and return a line for each difference.

        The lines name parameters whose values the checkpoint has changed or lost.
        """
        config = Config(model=self.model)
        single = ProcessMesh.single()
        whole = self.stages(single, build("gpipe", 1, MICROBATCHES))
        saved = {name: param.detach() for name, param in _named(whole)}
        halves = build("1f1b", RANKS, MICROBATCHES)

        # Another seed: a weight that is not loaded then differs from the saved one.
        def load(mesh: ProcessMesh, folder: Path) -> list[str]:
            modules = self.stages(mesh, halves, seed=2)
            load_checkpoint(folder, modules, None, config, mesh)
            return [name for name, param in _named(modules) if not torch.equal(param, saved[name])]

        with tempfile.TemporaryDirectory() as root:
            counters = {"consumed_train_samples": 0, "consumed_valid_samples": 0}
            folder = save_checkpoint(root, 1, whole, None, counters, config, single)
            assert folder is not None, "a save in the foreground"
            try:
                wrong = [
                    name
                    for names in run_threads(partial(load, folder=folder), pp=RANKS)
                    for name in names
                ]
            except CheckpointError as error:
                return [f"checkpoint: {problem}" for problem in error.problems]
        return [f"checkpoint: {name} differs from the saved one" for name in wrong]


def _differences(whole: _Result, ranks: Sequence[_Result], tp: int) -> Iterator[str]:
    """Yield a line for each loss, weight or gradient that differs from the whole model's.

    Args:
        whole: the outcome of the whole model.
        ranks: the outcomes of all ranks.
        tp: number of tensor-parallel ranks.
    """
    # Sorted, as DualPipe ends each half of the microbatches on a rank of its own.
    losses = sorted(x for r in ranks if r.tp_rank == 0 for x in r.losses)
    want_losses = sorted(whole.losses)
    if len(losses) != len(want_losses) or not _close(_vector(losses), _vector(want_losses)):
        yield f"losses are {losses}, not {want_losses}"
    found: dict[tuple[str, int], list[Tensor]] = defaultdict(list)
    layouts: dict[str, Layout] = {}
    for rank in ranks:
        for name, (layout, before, grad) in rank.params.items():
            layouts[name] = layout
            if name not in whole.params:
                yield f"{name} is no parameter of the whole model"
            elif not torch.equal(
                before, _slice(whole.params[name][1], layout, before, tp, rank.tp_rank)
            ):
                yield (
                    f"{name} starts otherwise than in the whole model: "
                    "give it a Layout, or a seed of its own"
                )
            # A parameter that this rank's tokens did not use has no gradient.
            found[name, rank.tp_rank].append(_or_zeros(grad, before))
    largest = max(
        (grad.abs().max().item() for _, _, grad in whole.params.values() if grad is not None),
        default=0.0,
    )
    close = partial(_close, rounding=ROUNDING * largest)
    for name, (_, before, grad) in whole.params.items():
        want = _or_zeros(grad, before)
        # DualPipe's mirrored ranks each have the gradient of half of the microbatches.
        sums = {t: torch.stack(found[name, t]).sum(0) for t in range(tp) if (name, t) in found}
        if len(sums) < tp:
            yield f"{name} is on no rank"
            continue
        if layouts[name].sum_over_tp:
            # In a run the optimizer does this, and there is none here.
            sums = dict.fromkeys(sums, torch.stack([*sums.values()]).sum(0))
        wrong = [
            t for t, got in sums.items() if not close(got, _slice(want, layouts[name], got, tp, t))
        ]
        if (
            wrong
            and layouts[name].dim is None
            and close(torch.stack([*sums.values()]).sum(0), want)
        ):
            yield (
                f"the gradient of {name} lacks a sum over tensor-parallel ranks: "
                "Layout(..., sum_over_tp=True)"
            )
        elif wrong:
            yield f"the gradient of {name} differs from the whole model's"


def _slice(whole: Tensor, layout: Layout, like: Tensor, tp: int, tp_rank: int) -> Tensor:
    """Return a tensor-parallel rank's part of a whole parameter, in the shape of `like`.

    Args:
        whole: the whole parameter, in its saved shape.
        layout: how the parameter is split. tp: number of tensor-parallel ranks.
        like: this rank's parameter.
        tp_rank: the tensor-parallel rank.
    """
    return layout.mine(whole.reshape(layout.full), Axis(tp_rank, tp)).reshape(like.shape)


def _or_zeros(grad: Tensor | None, param: Tensor) -> Tensor:
    """Return the gradient, or zeros for a parameter whose gradient is None."""
    return torch.zeros_like(param) if grad is None else grad


def _close(got: Tensor, want: Tensor, rounding: float = 1e-39) -> bool:
    # Relative to the largest number: small ones next to it have its rounding.
    return bool((got - want).abs().max() <= max(TOLERANCE * want.abs().max().item(), rounding))


def _vector(numbers: Sequence[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def _named(modules: Sequence[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    return [pair for module in modules for pair in module.named_parameters()]


def _forward_step(
    data: Iterator[Any] | None, model: nn.Module
) -> tuple[Tensor, Callable[..., Any]]:
    if data is None:
        return model(), _no_loss
    batch = next(data)
    return model(batch.tokens, batch.position_ids, labels=batch.labels), _loss


def _loss(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    return losses.sum(), torch.tensor(losses.numel()), {"lm loss": losses.detach().sum()}


def _no_loss(*_: object) -> None:
    raise AssertionError("a stage without loss has no loss function")
