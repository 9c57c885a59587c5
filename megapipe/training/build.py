"""Build this rank's stages, optimizer and learning-rate curve, and report the plan."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import nn

from megapipe.checkpoint.save_load import LoadedState
from megapipe.config import Config
from megapipe.distributed.device import graph_pool, memory_of
from megapipe.distributed.layout import layout_of
from megapipe.distributed.mesh import ProcessMesh
from megapipe.models.build import stage_module
from megapipe.models.gpt import GPTModel
from megapipe.models.provider import Provider, stage_provider
from megapipe.optim.lr import LRSchedule
from megapipe.optim.optimizer import Optimizer
from megapipe.pipeline_parallel.graphs.graphed import Graphs
from megapipe.pipeline_parallel.loss import ForwardStep
from megapipe.plan import Plan, changes, in_words, summary
from megapipe.plan.graphs import graphs_line, why_not
from megapipe.plan.logits import most_kept
from megapipe.plan.table import fits_line
from megapipe.schedule.recipe_line import to_line
from megapipe.training.guards.model import check_ownership
from megapipe.training.guards.replicas import check_replicas
from megapipe.training.hooks import Hooks
from megapipe.training.progress import Progress
from megapipe.training.report.lines import held_up_messages
from megapipe.training.report.reporter import Reporter
from megapipe.training.run import Run
from megapipe.training.steps.stages import Stages


def build_run(
    config: Config,
    mesh: ProcessMesh,
    plan: Plan,
    report: Reporter,
    provider: Provider,
    forward_step: ForwardStep,
    eod: int,
    hooks: Hooks,
) -> tuple[Run, Sequence[int]]:
    """Build a fresh run, before any checkpoint is loaded. Collective over the world.

    Args:
        config: the run's configuration, checked.
        mesh: this rank's mesh.
        plan: the plan of the run.
        report: writes the log.
        provider: builds this rank's stages.
        forward_step: Megatron's (data_iterator, model) -> (output, loss_func).
        eod: end-of-document id of the tokenizer.
        hooks: changes that the user's program makes to the run.
    Returns: (the run, the number of parameters of each stage).
    Raises: ConfigError on every rank if replicas of the model differ, or if the stages do not make
        up the model.
    """
    modules, parameters = _modules(config, mesh, plan, provider)
    # DualPipe: two chains of stages, so that each stage is on two ranks.
    mirrored = plan.schedule.placement.num_chains > 1
    # Before the optimizer, which would hide a difference: it sends weights to other ranks.
    check_replicas(modules, mesh, mirrored=mirrored)
    _say_plan(report, plan, parameters)
    stages = Stages(
        config,
        plan.schedule,
        modules,
        forward_step,
        mesh,
        eod,
        also_read=hooks.reading_stages(plan.spans),
        costs=plan.costs,
    )
    optimizer = Optimizer(
        modules, config.optimizer, mesh, groups=hooks.groups, **config.of_optimizer
    )
    stages.engine.wrap = _graphs(report, plan)
    frozen = config.optimizer.freeze_all_layers
    curve = LRSchedule(0.0) if frozen else LRSchedule.of(config)
    # Of an empty checkpoint, so that a fresh run starts by the code of a resumed one.
    start = Progress.after(LoadedState(), config.precision)
    run = Run(config, mesh, plan, report, modules, stages, optimizer, start, curve, hooks.lr)
    return run, parameters


def _modules(
    config: Config, mesh: ProcessMesh, plan: Plan, provider: Provider
) -> tuple[list[nn.Module], Sequence[int]]:
    """Build this rank's stages.

    Args:
        provider: builds the stages.
    Returns: (this rank's stages in ascending order, the number of parameters of each stage of the
        pipeline).
    """
    place = plan.schedule.placement
    own = [plan.spans[stage] for stage in place.stages_on(mesh.pp.rank)]
    # Megatron's signature numbers the stages of a rank, so the adapter needs their order here.
    provider = stage_provider(provider, own)
    modules = list[nn.Module]()
    for span in own:
        module = stage_module(config, provider, span, mesh.tp)
        if config.parallel.shards_weights:
            _to_host(module)
        modules.append(module)
    # Not the model's decision: the room for logits is the device's memory less the plan's bytes.
    kept = most_kept(config, plan, memory_of(mesh.device))
    for module in modules:
        if isinstance(module, GPTModel):
            module.most_kept = kept
    if mesh.dp_cp.rank == 0:
        count = sum(p.numel() for module in modules for p in module.parameters())
        where = f"({mesh.tp.rank}, {mesh.pp.rank})"
        # Megatron-LM's line, which tools read.
        print(
            f" > number of parameters on (tensor, pipeline) model parallel rank {where}: {count}",
            flush=True,
        )
    return modules, check_ownership(modules, config.model, provider, place, mesh)


def _to_host(module: nn.Module) -> None:
    """Move a stage's trained weights to the host, from where the optimizer takes its shards.

    A device may have no room for the weights of all stages before they are sharded.
    """
    for param in module.parameters():
        # A weight that another rank updates is never sharded.
        if param.requires_grad and not layout_of(param).received:
            param.data = param.data.cpu()


def _say_plan(report: Reporter, plan: Plan, parameters: Sequence[int]) -> None:
    """Print the plan: stages, memory, schedule and predicted bubble.

    Args:
        report: prints on one rank.
        plan: the plan of the run.
        parameters: number of parameters of each stage.
    """
    config = report.config
    mesh = report.mesh
    schedule = plan.schedule
    changed = changes(plan)
    if changed:
        report.say(changed)
    if mesh.world.rank == 0:
        print(summary(plan, config, parameters), flush=True)
        # A plan that does not fit starts all the same: it is an estimate.
        memory = memory_of(mesh.device)
        if memory is not None:
            print(fits_line(plan, memory, "this GPU"), flush=True)
    bubble = plan.timeline.bubble / plan.timeline.makespan
    report.say(
        f"pipeline schedule {schedule.name}{in_words(schedule)}: {mesh.pp.size} ranks, "
        f"{schedule.num_microbatches} microbatches, predicted bubble {bubble:.1%} of the "
        f"time of the passes, by {'FLOPs' if plan.given is None else 'costs'}"
    )
    if plan.recipe is not None:
        report.say(f"recipe: megapipe schedules show {to_line(plan.recipe)}")
    if mesh.device.type == "cuda":
        warning = held_up_messages(config, schedule)
        if warning:
            report.say(warning)


def _graphs(report: Reporter, plan: Plan) -> Graphs | None:
    """Return the CUDA graphs of this rank's stages, or None.

    There are graphs if --cuda-graph-impl asks for them and the device and schedule allow them. If
    the flag is given, a line says whether there are graphs.

    Args:
        report: prints on one rank.
        plan: the plan of the run.
    """
    config = report.config
    mesh = report.mesh
    device = mesh.device
    line = graphs_line(config, plan.schedule, device.type)
    if not line:
        return None
    report.say(line)
    if device.type != "cuda" or why_not(config, plan.schedule):
        return None

    def say(text: str) -> None:
        # One rank of each pipeline rank: their stages differ.
        if mesh.dp_cp.rank == 0:
            print(text, flush=True)

    return Graphs(partial(graph_pool, device), config.parallel.cuda_graph_warmup_steps, say)
