"""The plan without the run: tools/plan.py as a user calls it."""

import json
import re
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from programs import run

from megapipe.commands.main import command
from megapipe.commands.plan.telling import goes_on, slow
from megapipe.commands.plan.verdict import load_line, other_device
from megapipe.config import Config
from megapipe.errors import ConfigError
from megapipe.flags.parse import parse
from megapipe.plan import GIB, Plan, make_plan
from megapipe.plan.seconds.device import DEVICES, Device
from megapipe.schedule import SCHEDULES
from megapipe.schedule.costs_file import load_costs

MODEL = (
    "--num-layers 6 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 2000 --micro-batch-size 1 --global-batch-size 4 --train-iters 1 "
    "--lr 1e-3 --pipeline-model-parallel-size 2"
)


def plan(flags: str) -> subprocess.CompletedProcess[str]:
    return run(["tools/plan.py", *MODEL.split(), *flags.split()])


def test_the_split_that_it_prints_gives_the_same_plan():
    auto = plan("--pipeline-model-parallel-layout auto")
    assert auto.returncode == 0, auto.stderr
    (text,) = re.findall(r"^--pipeline-model-parallel-layout '(.+)'$", auto.stdout, re.MULTILINE)
    stage = re.compile(r"^ +\d .*$", re.MULTILINE)
    assert stage.findall(plan(f"--pipeline-model-parallel-layout {text}").stdout) == stage.findall(auto.stdout)


def test_the_split_that_it_prints_has_the_depths_where_they_stand(capsys):
    command("plan")([*MODEL.split(), "--mtp-num-layers", "1", "--pipeline-model-parallel-layout", "Ettm|ttttL"])
    assert capsys.readouterr().out.strip().splitlines()[-1] == "--pipeline-model-parallel-layout 'Ettm|t*4L'"


def test_costs_of_a_rehearsal_are_those_of_another_plan(tmp_path):
    file = tmp_path / "costs.json"
    words = f"--world-size 2 --steps 1 --save-costs {file} -- --distributed-backend gloo"
    measured = run(["tools/rehearse.py", *words.split(), *MODEL.split()])
    assert measured.returncode == 0, measured.stderr
    assert f"costs of the stages: {file}, for --pipeline-costs of a run" in measured.stdout
    costs = load_costs(file)
    assert isinstance(costs.f, tuple)
    assert len(costs.f) == 2  # seconds of two stages, the second with the head
    assert 0 <= costs.overhead < 1
    assert 0 < min(costs.f) <= max(costs.f) < 10
    assert plan(f"--costs {file} --pipeline-schedule zb-auto").returncode == 0
    refused = plan(f"--costs {file} --pipeline-schedule zb-v")
    assert "Costs.f names 2 stages, but the model is cut in 4" in refused.stderr


def test_what_a_run_would_refuse_is_refused():
    refused = plan("--num-layers 7")
    assert refused.returncode == 2
    assert refused.stderr.startswith("plan.py: error: --num-layers 7 does not fill 2 stages: 7 = 2 x 3 + 1.")


def test_a_plan_says_what_busier_experts_need():
    """0.7 GiB of room were called a fit, and an early router deals some rank 1.3 x the mean."""
    experts = MODEL.replace("16", "40") + " --padded-vocab-size 2048 --num-experts 4 --moe-router-topk 2"

    def planned(flags: str) -> tuple[Plan, Config]:
        config = replace(parse(Config, f"{experts} {flags}".split()), world_size=4)
        return make_plan(config), config

    # 40 tokens have 80 rows. Of a row the first product's 128 floats are kept, its weight and three numbers (int64).
    # The last rank, which needs most, holds one microbatch of its three layers.
    more = 0.3 * 80 * (4 * 128 + 4 + 3 * 8) * 3 / GIB
    assert f"with 1.3 x the mean of the tokens a rank needs up to {more:.3g} GiB more" in load_line(
        *planned("--expert-model-parallel-size 2")
    )
    # No expert can be busier than its capacity, or every rank has all experts.
    full = "--expert-model-parallel-size 2 --moe-pad-expert-input-to-capacity --moe-expert-capacity-factor 1.0"
    assert [load_line(*planned(flags)) for flags in (full, "--expert-model-parallel-size 1")] == ["", ""]
    # A plan that fits by half of that lacks the other half; of a plan without room the page says so anyway.
    one, config = planned("--expert-model-parallel-size 2")
    peak = max(one.peak_bytes)
    lacks = f". That is {more / 2:.3g} more than it may take"
    assert load_line(one, config, peak + more / 2 * GIB).endswith(lacks)
    assert not any("may take" in load_line(one, config, peak + x * GIB) for x in (2 * more, -more))


def test_a_plan_needs_none_of_the_runs_files(capsys):
    """A script of a cluster was refused on a laptop for the files that it names."""
    there = [*MODEL.replace("--mock-data", "--data-path no/where").split(), "--world-size", "2"]
    command("plan")(there)
    named = capsys.readouterr().out
    command("plan")([*there, "--check-paths", "no"])
    without = capsys.readouterr().out
    command("plan")([*MODEL.split(), "--world-size", "2"])
    assert without.partition("\nstage")[2] == capsys.readouterr().out.partition("\nstage")[2]
    missing = [line for line in named.splitlines() if line not in without.splitlines()]
    assert [line.partition(": ")[0] for line in missing] == ["missing here, and no plan needs it"]
    assert "no/where" in missing[0]


def test_the_number_of_processes_has_one_name_and_counts():
    """Of the optimizer's state under ZeRO-1 each of n replicas has an n-th."""
    peaks = [plan(f"--use-distributed-optimizer --world-size {n}") for n in (2, 8)]
    assert all(done.returncode == 0 for done in peaks), peaks[0].stderr
    assert peaks[0].stdout != peaks[1].stdout
    refused = plan("--world-size 3")
    assert "--world-size 3" in refused.stderr or "3 processes" in refused.stderr
    zero = "plan.py: error: --world-size 0 must be at least 1 and at most 100000"
    assert plan("--world-size 0").stderr.startswith(zero)
    assert "--pipeline-model-parallel-size 0 must be at least 1" in plan("--pipeline-model-parallel-size 0").stderr


@pytest.mark.parametrize("search", ["", "--search"])
def test_every_wrong_flag_of_plan_and_run_is_told_at_once(search):
    with pytest.raises(ConfigError) as caught:
        command("plan")(
            [
                *MODEL.split(),
                *f"{search} --wurld-size 2 --gpus 4 --seed x --split 1,1 --fix tq --num-attention-heads 5".split(),
            ]
        )
    said = "\n".join(caught.value.problems)
    assert "unknown flag --wurld-size; did you mean --world-size?" in said
    assert said.count("--gpus") == 1
    assert "--seed x: expected an integer" in said
    assert "--hidden-size 32 is not divisible by --num-attention-heads 5" in said
    if search:
        assert "--fix tq is no axis" in said
        assert "--search needs --world-size" not in said  # the misspelled flag may be it
    else:
        assert "--fix tq is of --search" in said


def test_a_machine_reads_what_the_table_says(tmp_path, capsys):
    flags = [*MODEL.split(), "--pipeline-model-parallel-size", "3"]
    command("plan")([*flags, "--json", "-"])
    told = json.loads(capsys.readouterr().out)
    command("plan")([*flags, "--json", str(tmp_path / "plan.json")])
    assert json.loads((tmp_path / "plan.json").read_text()) == told
    shown = [line.split() for line in capsys.readouterr().out.splitlines()[1:4]]
    assert [f"{stage['parameters']:,}" for stage in told["stages"]] == [row[-4] for row in shown]
    assert [f"{peak / 2**30:.3g}" for peak in told["peak_bytes"]] == [row[-1] for row in shown]
    assert [stage["layers"] for stage in told["stages"]] == [[0, 1], [2, 3], [4, 5]]


DENSE = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096"
DENSE += " --mock-data --lr 1 --train-iters 9 --tokenizer-type NullTokenizer --vocab-size 32000 --bf16 --rates h100"
DENSE += " --micro-batch-size 1 --global-batch-size 64 --world-size 8 --memory-gib 80"


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


@pytest.mark.parametrize("layers", [24, 28, 7, 1])
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


def test_a_limit_above_the_memory_of_the_card_is_no_remedy():
    """--memory-limit-gib 24.7 was named as the remedy for a card of 24 GiB."""
    wide = "--hidden-size 8192 --num-attention-heads 64 --num-layers 2 --world-size 1 --pipeline-model-parallel-size 1"
    line = [*MODEL.split(), *wide.split(), "--memory-limit-gib", "10"]
    with pytest.raises(ConfigError) as caught:
        command("plan")([*line, "--rates", "h200"])
    need = float(re.search(r"Use --memory-limit-gib (\S+), a larger", str(caught.value))[1])
    assert 24 < need < 40
    with pytest.raises(ConfigError) as caught:
        command("plan")([*line, "--rates", "rtx4090"])
    more = re.search(r"That is (\S+) GiB more than a device of --rates has. Use a larger --pip", str(caught.value))[1]
    assert float(more) == pytest.approx(need - 24, abs=0.1)


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


@pytest.mark.parametrize("device, gib", [("rtx4090", 24), ("h200", 141), ("a100-40", 40), ("A100 80GB", 80)])
def test_a_named_device_has_its_own_memory(device, gib, capsys):
    """A card of 24 GiB was given plans of 30, as 80 were assumed for every card."""
    line = [word for word in DENSE.split() if word not in ("--memory-gib", "80")]
    command("plan")([*line, "--rates", device, "--use-distributed-optimizer"])
    said = capsys.readouterr().out
    assert f"a device has {gib} GiB, {gib / 10:.3g} of them reserved" in said
    assert ("does not fit" in said) == (gib < 80)
    with pytest.raises(ConfigError, match=f"--rates {device}-2 is neither a device that is known by name"):
        command("plan")([*line, "--rates", f"{device}-2"])


@pytest.mark.parametrize(
    "own", ["", "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"]
)
def test_a_plan_without_rates_has_an_h100s_seconds_and_its_memory(own, tmp_path, capsys):
    """Speeds were an H100's, but no memory was known: changes that need more of it were left out without a word."""
    rates = tmp_path / "rates.json"
    rates.write_text('{"outside": 4e10}')
    line = DENSE.replace("--rates h100", "").replace("--memory-gib 80", "").split()
    line += ["--pipeline-model-parallel-size", "4", "--use-distributed-optimizer", *own.split()]
    found = []
    for device in ("", "--rates h100", f"--rates {rates}"):
        command("plan")([*line, *device.split()])
        said = capsys.readouterr().out
        found.append((re.findall("^one change.*", said, re.MULTILINE), re.findall(r"fits with \S+ to spare", said)))
        assert ("assumed: 80 GiB a device; peak" in said) == (device != "--rates h100")
        assert (f"not known ({rates}, with an H100's flops, peak, inside): 80 GiB are" in said) == ("json" in device)
    assert found[0] == found[1] == found[2]
    assert all(map(len, found[0]))
    # The part of an assumed memory that stays free may be given.
    command("plan")([*line, "--reserved-gib", "79.9"])
    assert "of the 79.9 reserved" in capsys.readouterr().out


def test_a_plan_whose_experts_exchange_tokens_between_nodes_is_no_sure_one(capsys):
    experts = "--num-experts 16 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-token-dispatcher-type alltoall"
    for ranks, far in ((8, False), (16, True)):
        layout = f"--expert-model-parallel-size {ranks} --world-size 16 --use-distributed-optimizer"
        words = [*DENSE.split(), *experts.split(), *layout.split()]
        command("plan")(words)
        said = capsys.readouterr().out
        assert ("its experts exchange tokens between nodes." in said) == far
        # On one pipeline rank this order of ranks is the other one.
        command("plan")([*words, "--use-tp-pp-dp-mapping"])
        assert capsys.readouterr().out.partition("\nstage")[2] == said.partition("stage")[2]


def test_a_plan_that_takes_long_says_that_it_goes_on(capsys):
    """A vocabulary on all ranks within a memory limit took two minutes without a word."""
    own = parse(Config, [*MODEL.split(), "--vocab-parallel-pipeline", "--memory-limit-gib", "1"])
    began = time.monotonic()
    said = ""
    with goes_on(f"making the plan{slow(own)}"):
        while "making" not in said and time.monotonic() < began + 60:
            time.sleep(0.05)
            said += capsys.readouterr().err
    assert re.match(
        r"\d+ s: making the plan; --memory-limit-gib with --vocab-parallel-pipeline may take minutes\n", said
    )
    assert "limit" not in slow(parse(Config, MODEL.split()))


def told(line: list[str], capsys) -> dict:
    command("plan")([*line, "--json", "-"])
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("rates, says", [("h100", "not known, as --rates has no disk"), ("", "8")])
def test_a_page_says_the_seconds_of_a_save_or_what_it_lacks(capsys, tmp_path, rates, says):
    command("plan")(MODEL.split())
    size = float(re.search(r"a checkpoint has (\S+) GiB", capsys.readouterr().out)[1]) * 2**30
    if not rates:
        rates = str(tmp_path / "rates.json")
        Path(rates).write_text(json.dumps({"disk": size / 8}))
    command("plan")([*MODEL.split(), "--rates", rates])
    assert f"seconds to save it: {says}" in capsys.readouterr().out


@pytest.mark.parametrize(("rates", "flops"), [("h100", 5e14 / 3e11), ("a100", 1.9e14 / 2.2e11)])
def test_a_byte_of_sharded_weights_costs_what_rates_say_and_a_run_has_the_same_plan_by_a_flag(rates, flops, capsys):
    """One page said 22% for gathers, of 8000 FLOPs a byte, and 3.2% by the speeds of --rates."""
    line = [*MODEL.split(), *["--pipeline-model-parallel-size", "1", "--world-size", "4", "--use-megatron-fsdp"]]
    command("plan")([*line, "--rates", rates])
    said = capsys.readouterr().out
    assert f"where a byte takes as long as {round(flops)} FLOPs" in said
    added = f"--data-parallel-flops-per-byte {round(flops)}"
    assert f"So that a run makes this plan, add {added}: its default is 8000" in said
    assert told([*line, "--rates", rates], capsys)["plan"] == told([*line, *added.split()], capsys)["plan"]
    # A check by these rates is of the same plan, and says the same.
    command("check")([*line, "--rates", rates])
    checked = capsys.readouterr().out
    assert f"where a byte takes as long as {round(flops)} FLOPs" in checked
    assert f"So that a run makes this plan, add {added}" in checked
    assert f"plan {told([*line, *added.split()], capsys)['plan']}" in checked
    # A number of the user stays, and without shards nothing is said.
    command("plan")([*line, "--rates", rates, "--data-parallel-flops-per-byte", "5"])
    said = capsys.readouterr().out
    assert "as long as 5 FLOPs" in said
    assert "So that a run makes this plan" not in said
    command("plan")([*line[:-1], "--rates", rates])
    assert "FLOPs, by --rates" not in capsys.readouterr().out


def test_the_names_of_rates_stand_in_the_help(capsys):
    with pytest.raises(SystemExit):
        command("plan")(["--help"])
    words = " ".join(capsys.readouterr().out.split())
    assert "--rates names the device" in words
    for name in DEVICES:
        assert re.search(rf"\b{name}\b", words)


def test_a_memory_that_is_not_of_the_device_whose_speeds_count_is_named():
    """A search for 24 GiB took an H100's speeds, in one long line, and gave 2.8 s for 15.7."""
    h100 = DEVICES["h100"]
    (line,) = other_device(24, h100)
    assert line == (
        "24 GiB is not the memory of the device whose speeds are assumed, 80 GiB (H100's data sheet): "
        "name yours by --rates rtx4090"
    )
    (line,) = other_device(37, h100)
    assert line.endswith("name yours by --rates one of " + ", ".join(DEVICES) + ", or a .json")
    assert [other_device(x, h100) for x in (None, 80, 79, 72)] == [[]] * 4
    assert other_device(24, DEVICES["rtx4090"]) == other_device(24, DEVICES["a100"]) == []
    # A100s have 40 or 80, and nobody is asked about an H100.
    (line,) = other_device(None, DEVICES["a100"])
    assert line.endswith("80 GiB are assumed, and --rates a100-40 or --rates a100-80 or --memory-gib says another")
    assert other_device(None, Device()) == []


@pytest.mark.parametrize("schedule", ["", "--pipeline-schedule dualpipe-v"])
def test_a_tied_embedding_counts_once_where_one_rank_has_both_ends(schedule, capsys):
    """A model of 3.2e9 parameters was said to have 3.6e9."""
    ranks = 2 if schedule else 1
    line = [*MODEL.split(), "--padded-vocab-size", "2048", "--pipeline-model-parallel-size", str(ranks)]
    line += ["--num-layers", "8", *schedule.split()]
    untied = "--untie-embeddings-and-output-weights"
    tied, apart = (sum(x["parameters"] for x in told(one, capsys)["stages"]) for one in (line, [*line, untied]))
    assert apart - tied == 2048 * 32
    command("plan")(line)
    rows = [x.split() for x in capsys.readouterr().out.splitlines()[1 : 1 + 2 * ranks - (ranks == 1)]]
    assert sum(int(row[-4].replace(",", "")) for row in rows) == tied
