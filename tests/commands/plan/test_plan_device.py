"""A plan has the memory and the speeds of the device that --rates names."""

import json
import re
from pathlib import Path

import pytest
from nightly import by_night

from megapipe.commands.main import command
from megapipe.commands.plan.verdict import other_device
from megapipe.errors import ConfigError
from megapipe.plan import GIB
from megapipe.plan.seconds.device import DEVICES, Device
from tests.commands.plan.lines import DENSE, MODEL, told


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


FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


@pytest.mark.parametrize("own", by_night(["", FULL], day=[FULL]))
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


@pytest.mark.parametrize(("ranks", "each"), [(2, 12), (4, 6), (8, 6)])
def test_ranks_on_a_cpu_share_the_memory_of_the_host_in_a_plan_and_in_a_check(ranks, each, tmp_path, capsys):
    """For one laptop a plan assumed 80 GiB, which left 71.9 to spare, and a check spoke of A100s."""
    rates = tmp_path / "rates.json"
    source = "measured by megapipe rehearse on x86_64"
    rates.write_text(json.dumps({"host": 24 * GIB, "capacity": 24 * GIB, "node": 4, "source": source}))
    line = [*MODEL.split(), "--world-size", str(ranks), "--rates", str(rates)]
    command("plan")(line)
    said = capsys.readouterr().out
    assert f"a device has {each} GiB, {each / 10:.3g} of them reserved; {min(ranks, 4)} on a host of 24 GiB" in said
    assert "assumed, and" not in said
    for on_cpus in ([], ["--distributed-backend", "gloo"]):
        command("check")([*line, *on_cpus])
        said = capsys.readouterr().out
        assert f"memory of a device by --rates ({source}), {each} GiB, {each / 10:.3g} reserved: peak " in said
        assert f", by --rates ({source}): with communication" in said


@pytest.mark.parametrize(
    "split", ["", "--tensor-model-parallel-size 2", "--pipeline-slices 2", "--pipeline-schedule zb-h1"]
)
def test_costs_that_are_saved_with_rates_are_seconds_in_which_a_run_makes_the_plan_that_was_printed(
    split, tmp_path, capsys
):
    """`schedules show --costs` of the file said makespan 52667036467, and the plan 6.28 s."""
    file = str(tmp_path / "costs.json")
    line = [*MODEL.split(), *split.split(), "--world-size", "4"]
    command("plan")([*line, "--rates", "h100", "--save-costs", file, "--json", f"{file}n"])
    assert f"costs of the stages, in seconds, by --rates: {file}, for" in capsys.readouterr().out
    found = json.loads(Path(f"{file}n").read_text())["step"]["predicted"]
    after = sum(found["shares"].get(name, 0.0) for name in ("gradient sums", "update"))
    by_costs = told([*line, "--costs", file], capsys)["step"]["time"]
    assert by_costs == pytest.approx(found["seconds"] * (1 - after), rel=1e-3)
    if split:
        return
    # Without --rates they are FLOPs, of which the head is the same part.
    command("plan")([*line, "--save-costs", f"{file}f"])
    assert f"costs of the stages, in FLOPs: {file}f, for" in capsys.readouterr().out
    seconds, flops = (json.loads(Path(name).read_text()) for name in (file, f"{file}f"))
    assert seconds["head_f"] / seconds["f"][-1] == pytest.approx(flops["head_f"] / flops["f"][-1])
