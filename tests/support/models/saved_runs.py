"""Short runs that load and save, with weights in shards or not: what ranks of a pool are asked to do."""

import time
import warnings
from dataclasses import replace

import torch
from short_run import config, datasets
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from megapipe.config import CheckpointConfig, ModelConfig
from megapipe.data.tokenizers.tokenizer import build_tokenizer
from megapipe.distributed.layout import layout_of
from megapipe.models.provider import gpt_provider
from megapipe.training.forward_step import forward_step
from megapipe.training.pretrain import Training

SHARDED = {"use_megatron_fsdp": True}


def with_frozen_ends(*args, **kwargs):
    """A stage of the GPT whose embedding and head are not trained."""
    module = gpt_provider(*args, **kwargs)
    for name, param in module.named_parameters():
        if "layers." not in name:
            param.requires_grad_(False)
    return module


def trained(mesh, model: ModelConfig, parallel, steps, fields, frozen=False, **checkpoint):
    """Train to step `steps` in a layout, and save there. Returns the iteration at which the run has begun."""
    training = ready(mesh, model, parallel, steps, fields, frozen, **checkpoint)
    begun = training.run.progress.iteration
    training.train()
    return begun


def wrong_uses(mesh, folder, model, parallel, frozen):
    """Names of this rank's parameters that are not what a checkpoint of this layout has for them, once loaded."""
    run = ready(mesh, model, parallel, 4, {}, frozen, load=str(folder)).run
    there = whole_tensors(folder / "iter_0000002")
    with run.optimizer.gathers.whole():
        params = dict(pair for module in run.modules for pair in module.named_parameters())
        return [n for n, x in params.items() if not torch.equal(x, there[layout_of(x).tied_to or n].view_as(x))]


def whole_tensors(folder):
    """Every tensor of a checkpoint, put together from the parts in its files."""
    reader = HuggingFaceStorageReader(str(folder))
    there = reader.read_metadata().state_dict_metadata.items()
    found = {key: torch.full(x.size, torch.nan, dtype=x.properties.dtype) for key, x in there}
    with warnings.catch_warnings(action="ignore"):
        load(found, storage_reader=reader, no_dist=True)
    return found


def ready(mesh, model, parallel, steps, fields, frozen, **checkpoint):
    run = config(model, tp=mesh.tp.size, dp=mesh.dp.size, pp=mesh.pp.size, **fields)
    run = replace(
        run,
        parallel=replace(run.parallel, **parallel),
        batch=replace(run.batch, micro_batch_size=1, train_iters=steps),
        optimizer=replace(run.optimizer, lr_decay_iters=20),
        checkpoint=CheckpointConfig(**{"save_interval": steps} | checkpoint),
    )
    provider = with_frozen_ends if frozen else gpt_provider
    eod = build_tokenizer(run.data).eod
    return Training(run, mesh, provider, forward_step, datasets(), eod, time.monotonic())
