"""A page of a plan names the changes of one flag that make it fit or shorten its step."""

import json
import re
from dataclasses import replace

import pytest

from megapipe.commands.main import command
from megapipe.commands.plan.one_change import one_change
from megapipe.commands.plan.search.final import of_run
from megapipe.commands.plan.search.listed.asked import SearchRestrictions
from megapipe.commands.plan.verdict import Machine
from megapipe.config import Config
from megapipe.flags.parse import parse
from megapipe.plan import GIB
from megapipe.plan.seconds.device import Device
from megapipe.schedule import SCHEDULES
from tests.commands.plan.lines import DENSE, MODEL, told


def changes(capsys, flags):
    """[(flags, seconds, peak in GiB)] of the page's changes, and the page."""
    command("plan")([*DENSE.split(), *flags.split()])
    said = capsys.readouterr().out
    found = re.findall(r"^one change alone.*?: (--.*): (\S+) s, \S+% of a step, peak (\S+) GiB$", said, re.MULTILINE)
    return [(name, float(seconds), float(peak)) for name, seconds, peak in found], said


def test_a_page_names_a_schedule_that_shortens_the_step(capsys):
    """1F1B's bubble at p 4 and m 32 is 3/35 of a step; most of it goes with a split backward."""
    own = "--pipeline-model-parallel-size 4 --use-distributed-optimizer"
    found, _ = changes(capsys, own)
    flags, seconds, _ = next(x for x in found if x[0].startswith("--pipeline-schedule"))
    _, said = changes(capsys, f"{own} {flags}")
    assert f"{seconds:.4g} s" in said


def test_a_plan_that_does_not_fit_is_given_the_changes_that_make_it_fit(capsys):
    """18 bytes for each of 6.7e9 parameters are 113 GiB; with ZeRO-1 over 8 ranks 12 of them are an eighth."""
    found, said = changes(capsys, "")
    assert "does not fit" in said
    assert [flags for flags, _, _ in found] == ["--use-distributed-optimizer", "--tensor-model-parallel-size 2"]
    assert "one change alone makes it fit: --use-distributed-optimizer" in said
    assert found[0][2] < 72


def test_a_page_names_the_one_change_that_shortens_its_step_most(capsys):
    """Experts were split over tensor parallelism by default, across nodes, and no page said so."""
    flags = (
        "--pipeline-model-parallel-size 1 --tensor-model-parallel-size 8 --sequence-parallel --world-size 64 "
        "--num-attention-heads 8 --hidden-size 1024 --seq-length 1024 --max-position-embeddings 1024 --num-experts 8 "
        "--moe-router-topk 2 --expert-model-parallel-size 8 --moe-token-dispatcher-type alltoall --bf16 "
        "--moe-ffn-hidden-size 64 "
        "--global-batch-size 64"
    )
    one = [*MODEL.split(), *flags.split()]
    command("plan")(one)
    said = capsys.readouterr().out
    first, *others = re.findall(
        r"^one change alone: (--\S+) (\S+): (\S+) s(?: \(yours [^)]*\))?, (-\S+)% of a step, peak \S+ GiB$",
        said,
        re.MULTILINE,
    )
    assert len(others) <= 2
    name, value, seconds, gain = first
    assert (name, value) == ("--expert-tensor-parallel-size", "1")
    steps = []
    for line in (one, [*one, name, value]):
        command("plan")([*line, "--json", "-"])
        steps.append(json.loads(capsys.readouterr().out)["step"]["predicted"]["seconds"])
    assert float(seconds) == pytest.approx(steps[1], rel=1e-3)
    assert float(gain) == pytest.approx(100 * (steps[1] / steps[0] - 1), abs=0.1)


def test_no_change_is_named_for_which_a_device_or_a_host_has_no_room(capsys):
    """A page proposed a change whose saves the same page's host had no room for."""
    # In the V of dualpipe-v one rank has the embedding and the head. Nine microbatches are none of chimera's.
    flags = "--pipeline-model-parallel-size 4 --world-size 4 --global-batch-size 9 --num-layers 8"
    line = [*DENSE.split(), *flags.split(), "--untie-embeddings-and-output-weights"]
    change = "--pipeline-schedule dualpipe-v"
    plain, changed = (told(one, capsys) for one in (line, [*line, *change.split()]))
    assert changed["host_bytes"]["save"] > plain["host_bytes"]["save"]
    middle = 4 * (changed["host_bytes"]["save"] + plain["host_bytes"]["save"]) / 2 / 2**30
    for host, named in ((2048, True), (middle, False)):
        command("plan")([*line, "--host-memory-gib", str(host)])
        said = capsys.readouterr().out
        assert "GiB to save: fits" in said
        assert (f"one change alone: {change}" in said) == named


def test_weights_that_are_whole_at_once_are_gathered_in_parts_where_memory_is_short(capsys):
    """The page said that the plan does not fit, and named no change; a schedule alone frees nothing either."""
    flags = "--pipeline-model-parallel-size 1 --world-size 8 --bf16 --global-batch-size 8 --hidden-size 512 "
    line = [*MODEL.split(), *(flags + "--num-layers 24 --use-megatron-fsdp").split()]
    peak = max(told(line, capsys)["peak_bytes"]) / 2**30
    memory = ["--memory-gib", str(0.8 * peak), "--reserved-gib", "0"]
    command("plan")([*line, *memory])
    said = capsys.readouterr().out
    assert "all weights of a rank are whole at once" in said
    (words,) = re.findall(r"^one change alone makes it fit: (--pipeline-schedule .*): \S+ s, ", said, re.MULTILINE)
    changed = told([*line, *words.split()], capsys)
    assert max(changed["peak_bytes"]) / 2**30 <= 0.8 * peak
    assert "all weights of a rank" not in changed


@pytest.mark.parametrize("layers", [12, 14, 7, 1])
def test_each_number_of_parts_that_a_page_names_is_one_that_a_run_takes(layers, capsys):
    """A page named N without its values: 7 of 28 layers was refused, as hanayo goes down and up."""
    flags = f"--pipeline-model-parallel-size 1 --world-size 8 --global-batch-size 8 --num-layers {layers}"
    line = [*MODEL.split(), *flags.split(), "--use-megatron-fsdp"]
    command("plan")(line)
    found = re.search(r"--pipeline-schedule (\S+) --num-virtual\S+ N .*N may be ([\d, ]+)\)", capsys.readouterr().out)
    assert (found is None) == (layers == 1)
    for number in found[2].split(", ") if found else ():
        more = ["--pipeline-schedule", found[1], "--num-virtual-stages-per-pipeline-rank", number]
        assert told([*line, *more], capsys)["schedule"] == found[1]


def test_a_plan_that_only_full_recomputation_makes_fit_is_given_that(capsys):
    """Four devices of 24 GiB were told what a plan lacks, and no change that helps."""
    line = [*MODEL.split(), "--seq-length", "256", "--max-position-embeddings", "256", "--micro-batch-size", "4"]
    peaks = []
    for granularity in (None, "selective", "full"):
        given = ["--recompute-granularity", granularity] if granularity else []
        peaks.append(max(told([*line, *given], capsys)["peak_bytes"]) / 2**30)
    assert peaks[2] < 0.95 * min(peaks[:2])
    memory = str((peaks[2] + min(peaks[:2])) / 2)
    for own, says in (
        ("", "--recompute-granularity full"),
        ("--recompute-activations", "--unset recompute-activations --recompute-granularity full"),
        ("--recompute-granularity selective", "--recompute-granularity full"),
    ):
        command("plan")([*line, *own.split(), "--memory-gib", memory, "--reserved-gib", "0"])
        said = capsys.readouterr().out
        assert f"one change alone makes it fit: {says}: " in said
        # Microbatches of half as many sequences need half, in less time than those of one.
        assert "one change alone makes it fit: --micro-batch-size 2: " in said


def test_a_schedule_is_named_so_that_it_wins_over_the_zero_bubble_forks_switches(capsys):
    """The change was said as --pipeline-schedule alone, which a run refused next to --enable-zero-bubble."""
    own = "--pipeline-model-parallel-size 4 --use-distributed-optimizer --enable-zero-bubble --zero-bubble-v-schedule"
    own += " --zero-bubble-v-schedule-mem-setup min"
    found, _ = changes(capsys, own)
    flags, seconds, _ = next(x for x in found if "--pipeline-schedule" in x[0])
    _, said = changes(capsys, f"{own} {flags}")
    assert f"{seconds:.4g} s" in said


@pytest.mark.parametrize(
    "full, less",
    [
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", 0.9),
        ("--recompute-activations", 0.99),
        ("--recompute-granularity selective --recompute-modules core_attn mlp", 0.95),
        ("--activations-checkpoint-method uniform", 0.9),
        ("--recompute-lgd", 0.99),
    ],
)
def test_a_plan_with_room_is_told_what_a_step_takes_without_its_recomputation(full, less, capsys):
    """Full recomputation took 23% of a Mixtral step with 47 GiB to spare, and two hidings without proof were named."""
    line = [*DENSE.split(), "--use-distributed-optimizer", "--memory-gib", "400"]
    steps = [told([*line, *given.split()], capsys)["step"]["predicted"]["seconds"] for given in (full, "")]
    command("plan")([*line, *full.split()])
    said = capsys.readouterr().out
    (flags,) = re.findall(rf"^one change alone: (--unset .*): {steps[1]:.4g} s, ", said, re.MULTILINE)
    assert told([*line, *full.split(), *flags.split()], capsys)["step"]["predicted"]["seconds"] == steps[1]
    assert steps[1] < less * steps[0]


def test_a_vocabulary_that_makes_stages_unequal_is_named_as_what_mends_them(capsys):
    """4.6% of a step was unequal stages, no page said what mends them, and no search tries it."""
    own = (
        "--pipeline-model-parallel-size 4 --use-distributed-optimizer --global-batch-size 16 --padded-vocab-size 128000"
    )
    found, _ = changes(capsys, own)
    (seconds,) = (x[1] for x in found if x[0] == "--vocab-parallel-pipeline")
    _, said = changes(capsys, f"{own} --vocab-parallel-pipeline")
    assert f"predicted step {seconds:.4g} s" in said


def test_a_searched_plan_and_one_with_pairs_are_given_changes_too(capsys):
    """Who had zb-auto or pairs was told of no change, whatever it gained."""
    own = "--pipeline-model-parallel-size 4 --global-batch-size 8 --recompute-granularity full "
    own += "--recompute-method uniform --recompute-num-layers 1 --memory-gib 400 --overlap-moe-expert-parallel-comm"
    found, _ = changes(capsys, own)
    assert found
    searched = "--pipeline-model-parallel-size 4 --global-batch-size 4 --pipeline-schedule zb-auto --memory-gib 400"
    found, said = changes(capsys, searched)
    (seconds,) = (x[1] for x in found if x[0].startswith("--overlap-grad-reduce"))
    assert seconds < 0.99 * float(re.search(r"predicted step (\S+) s", said)[1])


def test_a_schedule_that_hides_no_messages_is_named_next_to_one_that_does(capsys):
    """An engineer with 1F1B was told of dualpipe-v alone, whose hiding no GPU has measured."""
    layout = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --sequence-parallel"
    command("plan")([*DENSE.split(), *layout.split(), "--global-batch-size", "16"])
    lines = [line for line in capsys.readouterr().out.splitlines() if "one change alone: --pipeline-schedule" in line]
    assert len(lines) == 2
    named = {line.split()[4].strip(":"): "which no GPU has measured" in line for line in lines}
    assert {name: SCHEDULES[name].pairs for name in named} == named
    assert sorted(named.values()) == [False, True]


def test_a_plan_that_no_single_change_makes_fit_says_so(capsys):
    command("plan")([*DENSE.split(), "--memory-gib", "8"])
    assert "no change of one flag alone makes it fit: --search changes several" in capsys.readouterr().out


def test_activations_of_which_each_tensor_rank_has_a_part_are_named_where_memory_is_short(capsys):
    own = "--tensor-model-parallel-size 2 --use-distributed-optimizer --reserved-gib 0"
    change = "--sequence-parallel"
    lines = (f"{DENSE} {own}".split(), f"{DENSE} {own} {change}".split())
    peaks = [max(told(line, capsys)["peak_bytes"]) / 2**30 for line in lines]
    found, said = changes(capsys, f"{own} --memory-gib {sum(peaks) / 2}")
    assert f"one change alone makes it fit: {change}: " in said
    (peak,) = (x[2] for x in found if x[0] == change)
    assert peak == pytest.approx(peaks[1], rel=5e-3)
    assert peaks[1] < peaks[0]


def test_weights_that_could_be_gathered_under_forwards_are_named(capsys):
    own = "--pipeline-model-parallel-size 2 --pipeline-schedule v-half --world-size 64 --use-distributed-optimizer "
    own += "--overlap-grad-reduce --ddp-bucket-size 40000000"
    change = "--overlap-param-gather"
    found, before = changes(capsys, own)
    (seconds,) = (x[1] for x in found if x[0] == change)
    again, after = changes(capsys, f"{own} {change}")
    assert f"predicted step {seconds:.4g} s" in after
    assert seconds < 0.99 * float(re.search(r"predicted step (\S+) s", before)[1])
    assert change not in {x[0] for x in again}


def test_of_many_changes_a_page_names_the_four_that_shorten_its_step_most(capsys):
    own = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --global-batch-size 16 --memory-gib 400 "
    own += "--padded-vocab-size 128000 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    steps, fifth = (
        told([*DENSE.split(), *f"{own} {more}".split()], capsys)["step"]["predicted"]["seconds"]
        for more in ("", "--overlap-grad-reduce --ddp-bucket-size 40000000")
    )
    command("plan")([*DENSE.split(), *own.split()])
    named = re.findall(r"^one change alone: .*?: (\S+) s, ", capsys.readouterr().out, re.MULTILINE)
    assert len(named) == 4
    assert [*map(float, named)] == sorted(map(float, named))
    assert max(map(float, named)) < fifth < 0.99 * steps


@pytest.mark.parametrize(
    ("flags", "most"), [("", 4096), ("--tensor-model-parallel-size 2 --overlap-moe-expert-parallel-comm", 512)]
)
def test_a_table_of_more_forwards_is_made_once_and_not_for_each_change(flags, most, capsys):
    """Each change makes a table. Two stages have two forwards of each microbatch."""
    own = f"--pipeline-model-parallel-size 2 --use-distributed-optimizer --memory-gib 400 {flags} "
    own += "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --world-size 4"
    replicas = 1 if flags else 2
    for microbatches, few in ((8, True), (most // 2 + 1, False)):
        command("plan")([*DENSE.split(), *own.split(), "--global-batch-size", str(replicas * microbatches)])
        assert ("one change alone: --unset recompute" in capsys.readouterr().out) == few


def test_costs_that_are_no_seconds_name_no_change(tmp_path, capsys):
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"f": [1] * 4, "b": [1] * 4, "w": [1] * 4}))
    for costs, named in (("", True), (f"--costs {file}", False)):
        said = changes(capsys, f"--pipeline-model-parallel-size 4 --memory-gib 4 {costs}")[1]
        assert "does not fit" in said
        assert ("change of one flag" in said) == named


def test_changes_of_one_flag_share_no_vocabulary_where_a_search_is_without_it():
    line = f"{DENSE} --pipeline-model-parallel-size 4 --use-distributed-optimizer --padded-vocab-size 128000"
    config = parse(Config, line.replace("--memory-gib 80", "").split())
    mine = of_run(replace(config.with_batch(64), world_size=8), Device())
    for words, named in ((frozenset(), True), (frozenset(["vocabulary"]), False)):
        said = one_change(mine, Device(), Machine(80 * GIB), SearchRestrictions(without=words))
        assert any("--vocab-parallel-pipeline" in text for text in said) == named
