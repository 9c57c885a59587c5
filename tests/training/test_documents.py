"""Document boundaries on every stage of a pipeline: the same losses as on one, and other losses than without."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny import LAYERS, STYLES, VOCAB

from megapipe.config import BatchConfig, Config, DataConfig, ModelConfig
from megapipe.data.loader import make_batch
from megapipe.distributed.mesh import ProcessMesh
from megapipe.models.provider import gpt_provider
from megapipe.partition.spans import partition
from megapipe.partition.spans import spans as spans_of
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.schedule import build
from megapipe.schedule.shapes.depths import with_depths
from megapipe.tensor_parallel.rng import initialize
from megapipe.training.forward_step import forward_step
from megapipe.training.steps.stages import Stages

EOD, SEQ = 0, 12
BATCH = BatchConfig(micro_batch_size=2, global_batch_size=8, seq_length=SEQ)


def loss(mesh: ProcessMesh, model: ModelConfig, data: DataConfig) -> float:
    """Mean loss of a batch of 4 microbatches in which every sixth token ends a document."""
    config = Config(model=model, batch=BATCH, data=data, world_size=mesh.pp.size)
    schedule = build("1f1b", mesh.pp.size, 4)
    spans = partition(model.layers, schedule.placement)
    modules = [gpt_provider(model, spans[mesh.pp.rank], mesh.tp)]
    initialize(modules[0], 1, mesh.tp)
    tokens = torch.randint(1, VOCAB, (4, 2, SEQ + 1), generator=torch.Generator().manual_seed(5))
    tokens[torch.rand(tokens.shape, generator=torch.Generator().manual_seed(6)) < 1 / 6] = EOD
    return Stages(config, schedule, modules, forward_step, mesh, EOD).run(list(tokens), 0)().means["lm loss"]


@pytest.mark.parametrize("style", STYLES)
def test_each_reset_changes_the_loss_and_every_stage_knows_the_documents(style):
    # A wide initialisation, so that what a token attends to shows in the loss.
    model = replace(STYLES[style], init_method_std=0.5, attention_dropout=0.0, hidden_dropout=0.0)
    seen = set()
    for isolate in (False, True):
        for restart in (False, True):
            data = DataConfig(reset_attention_mask=isolate, reset_position_ids=restart)
            alone = loss(ProcessMesh.single(), model, data)
            assert run_threads(lambda mesh, data=data: loss(mesh, model, data), pp=4) == [alone] * 4
            seen.add(round(alone, 4))
    # Rotation is relative: inside documents it does not matter where it starts.
    assert len(seen) == (3 if style == "llama" else 4)


def test_documents_reach_split_layers_and_layers_that_are_computed_again():
    data = DataConfig(reset_attention_mask=True, reset_position_ids=True)
    for base in STYLES.values():
        model = replace(base, init_method_std=0.5, hidden_dropout=0.0, attention_dropout=0.0)
        split = replace(model, sequence_parallel=True, recompute_granularity="full")
        found = run_threads(lambda mesh, split=split: loss(mesh, split, data), pp=2, tp=2)
        assert found == pytest.approx([loss(ProcessMesh.single(), model, data)] * 4, rel=1e-5)


def test_depths_within_documents_learn_what_they_learn_of_each_document_alone():
    """--mtp-within-documents, of three documents of which the last is cut off. By default a depth learns across."""
    model = replace(STYLES["llama"], init_method_std=0.5, mtp_num_layers=2)
    packed = [[3, 4, 5, 6, EOD], [7, 8, 9, EOD], [10, 11, 12, 13]]
    rows = torch.tensor([[token for document in packed for token in document]] * 2)

    def losses(mesh: ProcessMesh, rows: torch.Tensor, flag: bool) -> list[float]:
        its = replace(model, mtp_within_documents=flag)
        batch = replace(BATCH, global_batch_size=2, seq_length=rows.shape[1] - 1)
        data = DataConfig(reset_attention_mask=True, reset_position_ids=True)
        config = Config(model=its, batch=batch, data=data, world_size=mesh.pp.size)
        schedule = with_depths(build("1f1b", mesh.pp.size, 1), (mesh.pp.size - 1, 0))
        spans = spans_of([LAYERS // mesh.pp.size] * mesh.pp.size, schedule.placement)
        modules = [gpt_provider(its, spans[n], mesh.tp) for n in schedule.placement.stages_on(mesh.pp.rank)]
        for module in modules:
            initialize(module, 1, mesh.tp)
        means = Stages(config, schedule, modules, forward_step, mesh, EOD).run([rows], 0)().means
        return [means[f"mtp_{depth} loss"] for depth in (1, 2)]

    single = ProcessMesh.single()
    alone = [losses(single, torch.tensor([document] * 2), False) for document in packed]
    for depth in (1, 2):
        learned = [len(document) - 1 - depth for document in packed]
        mean = sum(n * its[depth - 1] for n, its in zip(learned, alone, strict=True)) / sum(learned)
        assert losses(single, rows, True)[depth - 1] == pytest.approx(mean, rel=1e-6)
        assert abs(losses(single, rows, False)[depth - 1] - mean) > 0.05
    assert run_threads(lambda mesh: losses(mesh, rows, True), pp=2) == [losses(single, rows, True)] * 2


def test_positions_restart_after_each_end_of_document():
    rows = torch.tensor([[5, EOD, 6, 7, EOD, EOD, 8], [EOD, 5, 6, 7, 8, 9, EOD]])
    batch = make_batch(rows, EOD, reset_position_ids=True)
    assert batch.position_ids.tolist() == [[0, 1, 0, 1, 2, 0], [0, 0, 1, 2, 3, 4]]
    assert batch.loss_mask.min() == 1
