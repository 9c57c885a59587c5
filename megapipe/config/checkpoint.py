"""The checkpoints of a run: which it writes, keeps and loads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megapipe.config.notes import FROM_0, FROM_1, Idle, Refused, at_least, demands, excludes, needs

SAVES = needs("save", "nothing is saved")
LOADS = needs("load", "nothing is loaded")
IN_MEMORY = needs("non_persistent_ckpt_type", "no state is kept in memory")
REPLICATES = needs("replication", "no rank keeps another one's state")


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving and loading of checkpoints."""

    # Which checkpoints are saved, and which are kept.
    # As in Megatron-LM, which has no default interval either.
    save: Annotated[
        str | None,
        demands("save_interval", says="{} needs --save-interval, for example --save-interval 1000"),
    ] = None
    """Folder to save checkpoints in. Default: save none."""
    save_interval: Annotated[int | None, FROM_1, SAVES] = None
    """Save after every this many steps, and at the end."""
    save_retain_interval: Annotated[int | None, FROM_1, SAVES] = None
    """Keep, of this run's checkpoints, the multiples of this step and the newest. The log names
    each one that is removed. Default: keep all."""
    save_keep_last: Annotated[int | None, FROM_1, SAVES] = None
    """Keep this many of the newest checkpoints, and the ones of --save-retain-interval. Remove the
    run's others. Default: keep all. Not in Megatron-LM."""
    save_remove_earlier: Annotated[
        bool, SAVES, needs("save_keep_last save_retain_interval", "nothing is removed")
    ] = False
    """Let --save-keep-last and --save-retain-interval also remove checkpoints of earlier runs in
    the folder. Default: only what this run saved or resumed from. Not in Megatron-LM."""
    save_failure: Annotated[Literal["stop", "continue"], SAVES] = "stop"
    """What the run does when a checkpoint cannot be saved. stop: it ends. continue: it warns, and
    tries again at the next save. Not in Megatron-LM."""
    # Loading, and settings that may differ.
    # May be empty: many scripts name one folder for both, in which their first run finds nothing.
    load: str | None = None
    """Folder to resume from. Without a checkpoint in it the run starts from the beginning."""
    exit_on_missing_checkpoint: Annotated[bool, LOADS] = False
    """Stop with an error if --load holds no checkpoint."""
    ckpt_step: Annotated[int | None, FROM_0, LOADS] = None
    """Load the checkpoint of this iteration. Default: the newest."""
    override_on_load: Annotated[tuple[str, ...], LOADS] = ()
    """Names of settings that may differ from the checkpoint's, such as: seq-length seed data-path.
    Not in Megatron-LM."""
    use_checkpoint_args: Annotated[
        bool,
        LOADS,
        excludes(
            "moe_use_upcycling",
            "{} is the dense model's architecture, and {} makes another",
            "Leave it out.",
        ),
    ] = False
    """Take the architecture from the checkpoint instead of the flags, if there is a checkpoint."""
    moe_use_upcycling: Annotated[
        bool,
        Refused(
            "{} takes the dense model from --load and saves the one with experts in --save. "
            "Give both.",
            lambda c: c.checkpoint.load is None or c.checkpoint.save is None,
        ),
        demands("num_experts", says="{} needs --num-experts, for example --num-experts 8"),
        excludes(
            "moe_shared_expert_intermediate_size",
            "{}: a dense model has no weights for a shared expert",
            "Leave out {}.",
            lambda c: c.model.has_experts,
        ),
    ] = False
    """Turn each MLP of the dense checkpoint in --load into experts, save that model in --save, and
    train from there."""
    moe_upcycling_granularity: Annotated[
        int, FROM_1, needs("moe_use_upcycling", "no experts are made")
    ] = 1
    """Width of the dense checkpoint's MLP as a multiple of --ffn-hidden-size. An expert is a slice
    of it."""
    finetune: Annotated[bool, LOADS] = False
    """Load the weights only, and start at iteration 0."""
    no_save_optim: Annotated[bool, SAVES] = False
    """Leave the optimizer state out of checkpoints."""
    no_load_optim: Annotated[
        bool,
        LOADS,
        excludes(
            "use_checkpoint_opt_param_scheduler",
            "{} begins the learning rate's curve anew, as in Megatron-LM, "
            "so there is nothing for {} to take",
        ),
    ] = False
    """Do not load the optimizer state. It and the learning rate's curve begin anew."""
    # Saving by hand, and while the run goes on.
    trigger_path: str | None = None
    """Folder to look into every --log-interval steps. A file `save` or `exit` there makes the run
    save, or save and stop, and is removed. Not in Megatron-LM."""
    async_save: Annotated[bool, SAVES] = False
    """Copy a checkpoint to shared memory, and write it by a process next to each rank while the run
    goes on. The first save of a run waits."""
    # In memory, for a run that loses ranks: nothing of it is on disk.
    non_persistent_ckpt_type: Annotated[
        Literal["local"] | None,
        demands(
            "non_persistent_save_interval",
            says="{} needs --non-persistent-save-interval, for example "
            "--non-persistent-save-interval 1",
        ),
        excludes("skip_train", "{}: {} changes no state"),
        excludes("freeze_all_layers", "{}: {} changes no state"),
        Refused(
            "{}: no two ranks have the same state, because they have shards, experts or stages of "
            "their own. A lost machine takes its ranks' states with it. Add --replication.",
            lambda c: c.equal_states <= 1 and c.world_size > 1 and not c.checkpoint.replication,
        ),
    ] = None
    """local: keep each rank's state in memory that outlives its process. Ranks that torchrun
    --max-restarts starts again go on from there, and read no disk."""
    non_persistent_save_interval: Annotated[int | None, FROM_1, IN_MEMORY] = None
    """Keep the state after every this many steps. Two of them are kept."""
    replication: Annotated[
        bool,
        IN_MEMORY,
        Idle(lambda c: c.equal_states > 1, "data parallelism keeps states equal: none is sent"),
    ] = False
    """Send each rank's state to other ranks too, if data parallelism gives none of them an equal
    one. A lost machine's state is then with them."""
    replication_jump: Annotated[int | None, FROM_1, REPLICATES] = None
    """Distance between ranks that keep each other's state: at least a machine's number of ranks.
    Default: the ranks divided by --replication-factor."""
    replication_factor: Annotated[int, at_least(2), REPLICATES] = 2
    """Number of ranks that have a state, its owner included."""
    elastic: Annotated[
        bool,
        IN_MEMORY,
        Refused(
            "{}: one rank is missing. Its peers can run its passes with data and pipeline "
            "parallelism alone, equal states, forwards and backwards in bf16, fp16 or fp32, and "
            "--dataloader-type single. Start all ranks, or a replica less.",
            lambda c: c.lacks_a_rank and not c.can_reroute,
        ),
    ] = False
    """Go on from states in memory with fewer or more data-parallel ranks, or without one rank,
    whose passes its peers run: the same samples in the same order, and the same global batch. Not
    in Megatron-LM."""

    def replicas_of(self, world: int) -> list[tuple[int, ...]]:
        """Divide the ranks of a world into sets that send each other their states (--replication).

        A set has F ranks: n, n + J, n + 2J and so on, as in NVIDIA's resiliency extension. J is
        --replication-jump, F --replication-factor. The extension demands that F x J divides the
        number of ranks. Here it need not: ranks that are left over join the last J sets.
        """
        factor = self.replication_factor
        # A single rank has nobody else.
        jump = self.replication_jump or max(world // factor, 1)
        last = max(world // (jump * factor), 1) - 1
        found = []
        for n in range(last + 1):
            first = n * jump * factor
            end = first + jump * factor
            if n == last:
                end = world
            found += [tuple(range(rank, end, jump)) for rank in range(first, first + jump)]
        return found
