"""Every flag of Megatron-LM acts, holds already, or is refused in a line that helps."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from megapipe.config import Config
from megapipe.errors import ConfigError
from megapipe.flags.help import meaning
from megapipe.flags.megatron_flags import MEGATRON_FLAGS
from megapipe.flags.noop_flags import NOOP_FLAGS, OLD_FLAGS
from megapipe.flags.old_names import OLD_NAMES
from megapipe.flags.parse import flags_of, parse
from megapipe.flags.rules import _REASONS, KNOWN, reason
from megapipe.flags.table import table
from tools.docs import hooks

ROOT = Path(__file__).parents[2]


def problem(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(Config, argv)
    (only,) = caught.value.problems
    return only


def test_a_flag_that_asks_for_what_is_always_so_is_accepted():
    config = parse(Config, ["--use-mcore-models", "--no-rope-fusion"])
    assert config == Config()
    assert config.noop_flags == (
        ("--use-mcore-models", "there is one model"),
        ("--no-rope-fusion", "names a fused kernel that we do not have"),
    )


@pytest.mark.parametrize(
    ("switches", "schedule"),
    [
        ("--enable-zero-bubble", "zb-auto"),
        ("--enable-zero-bubble --zero-bubble-max-pending-backward auto", "zb-auto"),
        ("--enable-zero-bubble --zero-bubble-max-pending-backward 4", "zb-h1"),
        ("--enable-zero-bubble --zero-bubble-max-pending-backward 8", "zb-h2"),
        ("--zero-bubble-v-schedule --enable-zero-bubble --zero-bubble-max-pending-backward 8", "zb-v"),
        ("--zero-bubble-v-schedule --zero-bubble-v-schedule-mem-setup zb", "zb-v"),
        ("--zero-bubble-v-schedule --zero-bubble-v-schedule-mem-setup half", "v-half"),
        ("--zero-bubble-v-schedule --zero-bubble-v-schedule-mem-setup min", "v-min"),
        ("--zero-bubble-max-pending-backward 8", None),
    ],
)
def test_the_zero_bubble_forks_switches_choose_the_schedule(switches, schedule):
    config = parse(Config, ["--pipeline-model-parallel-size", "4", *switches.split()])
    assert config.parallel.pipeline_schedule == schedule
    instead = f"--pipeline-schedule {schedule}" if schedule else "without effect: nothing turns such a schedule on"
    assert config.noop_flags == ((switches, instead),)


@pytest.mark.parametrize(
    ("flags", "instead"),
    [
        ("--num-layers 22", "--pipeline-model-parallel-layout auto"),
        (
            "--num-layers 30 --num-layers-per-virtual-pipeline-stage 1",
            "--pipeline-model-parallel-layout auto --num-virtual-stages-per-pipeline-rank 4",
        ),
        ("--num-layers 32 --num-layers-per-virtual-pipeline-stage 2", "the layers fill the stages"),
        (
            "--num-layers 22 --decoder-first-pipeline-num-layers 1",
            "another flag says which stage holds how many layers",
        ),
    ],
)
def test_the_zero_bubble_forks_padding_of_layers_is_an_uneven_split(flags, instead):
    config = parse(Config, ["--pipeline-model-parallel-size", "8", "--allow-padding-num-layers", *flags.split()])
    assert config.noop_flags == (("--allow-padding-num-layers", instead),)
    assert (config.parallel.pipeline_model_parallel_layout == "auto") == instead.startswith("--pipeline")


def test_a_schedule_of_batch_sizes_needs_no_quotes():
    """Megatron-LM's examples/gpt3 loses them in a bash array."""
    for sizes in (["0:16 2.4B:320"], ["0:16", "2.4B:320"]):
        assert parse(Config, ["--step-batch-size-schedule", *sizes]).batch.step_batch_size_schedule == "0:16 2.4B:320"


def test_a_number_of_the_forks_that_python_does_not_read_is_refused():
    """int() refuses more than 4300 digits with a ValueError, which was a traceback; found by drawn command lines."""
    many, pp = "9" * 5000, ("--pipeline-model-parallel-size", "4")
    pending = ("--enable-zero-bubble", "--zero-bubble-max-pending-backward", many)
    assert problem(*pp, *pending).endswith("Use 4 (zb-h1), 8 (zb-h2) or auto.")
    group = ("--interleave-group-size", many, "--num-layers-per-virtual-pipeline-stage", "1")
    assert problem(*pp, *group).endswith("Use 2 to 4.")


def test_the_zero_bubble_forks_groups_are_group_interleaved():
    flags = ["--pipeline-model-parallel-size", "8", "--interleave-group-size"]
    chunks = ["--num-layers-per-virtual-pipeline-stage", "1"]
    for said, group in (("5", 5), ("9", 8)):  # the fork takes more than pp for pp
        parallel = parse(Config, [*flags, said, *chunks]).parallel
        assert parallel.pipeline_schedule == "group-interleaved"
        assert parallel.microbatch_group_size_per_virtual_pipeline_stage == group
    assert parse(Config, [*flags, "4"]).parallel.pipeline_schedule is None
    assert parse(Config, [*flags, "4", *chunks, "--zero-bubble-v-schedule"]).parallel.pipeline_schedule == "zb-v"


def test_the_zero_bubble_forks_recompute_lgd_is_norms_and_mlp():
    model = parse(Config, ["--recompute-lgd", "--offload-continuous-buffers"]).model
    assert (model.recompute_norms, model.recompute_mlp, model.recompute_attention) == (True, True, False)


def test_names_of_2023_keep_their_values():
    flags = "--layernorm-epsilon 1e-6 --activations-checkpoint-method block --DDP-impl local"
    model = parse(Config, flags.split()).model
    assert (model.norm_epsilon, model.recompute_granularity, model.recompute_method) == (1e-6, "full", "block")


def test_a_flag_that_holds_already_may_take_several_values():
    flags = ["--cp-comm-type", "a2a+p2p", "--hierarchical-context-parallel-sizes", "2", "2"]
    assert [name for name, _ in parse(Config, flags).noop_flags] == [" ".join(flags[2:])]


def test_no_position_embedding_never_takes_rotary_positions_away():
    rope = ["--position-embedding-type", "rope", "--no-position-embedding"]
    assert parse(Config, rope).model.position_embedding_type == "rope"
    assert parse(Config, ["--use-rotary-position-embeddings"]).model.position_embedding_type == "rope"


def test_the_help_of_a_flag_says_where_megatron_has_it_not():
    ours = {name for name, flag in flags_of(Config).items() if meaning(flag).endswith("Not in Megatron-LM.")}
    assert set(flags_of(Config)) - MEGATRON_FLAGS == ours


def test_each_name_has_one_class():
    fields = {spelling for name in flags_of(Config) for spelling in (name, name.replace("_", "-"))}
    assert not set(NOOP_FLAGS) & fields
    assert not set(OLD_NAMES) & (fields | set(NOOP_FLAGS))
    assert set(NOOP_FLAGS) <= KNOWN
    assert set(OLD_FLAGS) <= set(NOOP_FLAGS)


def test_every_reason_fits_some_flag_that_is_refused():
    refused = MEGATRON_FLAGS - set(flags_of(Config)) - set(NOOP_FLAGS) - set(OLD_NAMES)
    assert {why for _, why in _REASONS} == {reason(name) for name in refused} - {""}


def test_the_command_prints_the_table_that_the_site_shows():
    command = [sys.executable, "-m", "megapipe.flags.table"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert printed == table()
    assert printed in hooks.flags()


def test_the_table_names_every_flag_of_megatron_once():
    cells = re.findall(r"`(--[^`]+)`", table())
    assert {*cells} | {"--override-opt-param-scheduler", "--use-checkpoint-opt-param-scheduler"} >= MEGATRON_FLAGS
    assert len(cells) == len({*cells})
