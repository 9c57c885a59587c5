"""A run whose process is lost goes on from memory: the same numbers to the bit, and no checkpoint is read."""

from __future__ import annotations

from dataclasses import replace

import pytest
from programs import run
from short_run import config, run_of
from tiny import STYLES

from megapipe.checkpoint.memory import slots
from megapipe.checkpoint.memory.relayout import size_of
from megapipe.distributed.layout import layout_of
from megapipe.distributed.mesh import ProcessMesh
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.plan import make_plan
from megapipe.plan.families.replicas import stage_bytes
from megapipe.training.guards.process import Stopping
from megapipe.training.guards.recovery import state_of

IN_MEMORY = {"non_persistent_ckpt_type": "local", "non_persistent_save_interval": 1}
MODEL = replace(STYLES["gpt2"], num_layers=1)
CASES = {
    "gpt2": {},
    "16 bits": {"bf16": True},
    "a loss scale that falls": {"fp16": True, "initial_loss_scale": 2.0**40, "hysteresis": 1},
    "moments in 16 bits": {"bf16": True, "use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16"},
    "muon": {"optimizer": "muon"},
}


@pytest.fixture(autouse=True)
def memory(tmp_path, monkeypatch):
    """A machine's memory, and a launcher that starts lost processes again."""
    monkeypatch.setattr(slots, "SHARED", tmp_path)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    return tmp_path


def steps(training, count):
    found = []
    for _ in range(count):
        result = training.driver.whole()
        found.append((result.losses["lm loss"], result.grad_norm, result.skipped, training.run.rate()))
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_process_in_the_place_of_a_lost_one_has_its_numbers(case, capsys):
    plain = steps(run_of(ProcessMesh.single(), config(MODEL, **CASES[case])), 7)
    flags = config(MODEL, **CASES[case], **IN_MEMORY)
    # As text: a norm that is not finite equals itself there.
    assert repr(steps(run_of(ProcessMesh.single(), flags), 4)) == repr(plain[:4])
    second = run_of(ProcessMesh.single(), flags)
    # The state after step 4 would have been copied during step 5.
    assert second.run.progress.iteration == 3
    assert "all ranks are back at iteration 3, 0 step(s) are lost, in" in capsys.readouterr().out
    assert repr(steps(second, 2)) == repr(plain[3:5])
    third = run_of(ProcessMesh.single(), flags)
    assert repr(steps(third, 3)) == repr(plain[4:])


def test_it_copies_as_often_as_its_flag_says_and_before_each_save(tmp_path):
    flags = config(MODEL, **IN_MEMORY | {"non_persistent_save_interval": 3})
    first = run_of(ProcessMesh.single(), flags)
    seen = []
    for _ in range(8):
        steps(first, 1)
        seen.append(first.copies.done)
    assert seen == [0, 0, 0, 3, 3, 3, 6, 6]
    saves = flags.with_fields(save=str(tmp_path / "disk"), save_interval=5)
    second = run_of(ProcessMesh.single(), saves)
    assert second.run.progress.iteration == 6
    steps(second, 4)
    assert second.copies.done == 9
    assert not second._between_steps(10, Stopping(saves.guards, second.run.mesh, 0.0))
    assert second.copies.done == 10


def test_nothing_stays_after_the_end_and_nothing_is_kept_without_a_launcher(memory, monkeypatch, capsys):
    flags = config(MODEL, **IN_MEMORY, train_iters=2, lr_warmup_iters=0)
    training = run_of(ProcessMesh.single(), flags)
    assert len(list(memory.glob("*/0/*"))) == 2
    assert training.train() == 0
    assert list(memory.iterdir()) == []
    monkeypatch.delenv("TORCHELASTIC_MAX_RESTARTS")
    assert run_of(ProcessMesh.single(), flags).copies is None
    assert "nothing is kept in memory. No launcher starts a lost rank again" in capsys.readouterr().out


@pytest.mark.parametrize("half, each", [(False, 12), (True, 12)])
def test_its_bytes_are_those_of_the_formula_to_the_byte(half, each):
    """Main parameters and two moments in float32, without a tied head; each begins at a multiple of 64 elements."""
    flags = config(STYLES["gpt2"], bf16=half, **IN_MEMORY)
    training = run_of(ProcessMesh.single(), flags)
    params = [pair for module in training.run.modules for pair in module.named_parameters()]
    sizes = [p.numel() for name, p in params if not name.startswith("output_layer")]
    assert stage_bytes(make_plan(flags), flags) == [each * sum(sizes)]
    padded = sum(-(-size // 64) * 64 for size in sizes)
    assert size_of(training.copies._state) == each * padded


def test_ranks_that_are_killed_with_their_memory_come_back_from_their_buddies():
    program = ["-m", "tools.proofs.nodisk", "--world", "2", "--layouts", "pp2", "--kills", "3"]
    how = ["--schedules", "zb-h1+", "--steps", "9", "--nodes", "1", "--seed", "4"]
    done = run([*program, *how], timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    # --replication is in its flags; SystemExit would name a difference.
    assert ", 0 differ; " in done.stdout
    assert " 3 kills,   3 with their memory" in done.stdout, done.stdout


def test_a_rank_that_stays_away_is_replaced_by_its_peers_to_the_bit():
    """In fp16, where losses of another scale make other gradients underflow."""
    program = ["-m", "tools.proofs.nodisk.elastic", "--layouts", "dp2pp2fp16", "--schedule", "zb-h1"]
    done = run([*program, "--steps", "6"], timeout=900)
    # SystemExit would name a loss, norm, weight or sample that differs.
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ranks 4 -> 3 -> 4, 2 returns in memory; " in done.stdout


@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 2, "pp": 2, "use_distributed_optimizer": True},
        {"tp": 2, "pp": 2},
        {"dp": 2, "use_distributed_optimizer": True, "bf16": True},
        {"dp": 2, "pp": 2, "num_experts": 4, "expert_model_parallel_size": 2},
    ],
    ids=str,
)
def test_on_several_ranks_too_its_bytes_are_those_of_the_formula(layout):
    """12 bytes for each parameter, of which a shard is counted in shares that begin at multiples of 64."""
    trained = config(STYLES["gpt2"], **layout)
    flags = trained.with_fields(replication=True, **IN_MEMORY)
    sizes = {axis: layout.get(axis, 1) for axis in ("tp", "dp", "pp")}
    experts = {"ep": layout["expert_model_parallel_size"]} if "num_experts" in layout else {}

    mesh_tp = sizes["tp"]

    def body(mesh):
        run = run_of(mesh, trained).run
        counts = {False: [0, 0], True: [0, 0]}
        for module in run.modules:
            for name, p in module.named_parameters():
                if name.startswith("output_layer") and mesh.pp.size == 1:
                    continue
                found = counts[layout_of(p).experts]
                found[0] += p.numel()
                found[1] += -(-p.numel() // 64) * 64
        shares = mesh.dp.size if "use_distributed_optimizer" in layout else 1
        held = sum(12 * -(-padded // (64 * shares)) * 64 for _, padded in counts.values())
        plain = sum(12 * n / shares for n, _ in counts.values())
        return size_of(state_of(run)), held, mesh.pp.rank, plain

    plan = stage_bytes(make_plan(flags), flags)
    for kept, held, stage, plain in run_threads(body, **sizes, **experts):
        assert kept == held
        # The plan takes norms and biases for split over tensor parallelism, too.
        assert plan[stage] == plain if mesh_tp == 1 else plan[stage] == pytest.approx(plain, rel=0.03)


@pytest.mark.parametrize("elastic", [True, False])
def test_states_of_another_number_of_ranks_are_taken_by_elastic_alone(elastic, memory, capsys):
    flags = config(STYLES["gpt2"], **IN_MEMORY, elastic=elastic)
    steps(run_of(ProcessMesh.single(), flags), 3)
    (folder,) = memory.glob("*/0")
    # As if there had been two replicas, whose states are equal.
    for n in range(2):
        (folder / f"1-0.{n}").rename(folder / f"2-0.{n}")
    again = run_of(ProcessMesh.single(), flags)
    text = capsys.readouterr().out
    if elastic:
        assert again.run.progress.iteration == 2
        assert "all ranks are back at iteration 2, 0 step(s) are lost; there were 2 ranks, and there are 1" in text
    else:
        assert again.run.progress.iteration == 0
        assert "the states are of another number of ranks than 1, which --elastic would take" in text
    assert sorted(path.name for path in folder.iterdir()) == ["1-0.0", "1-0.1"]
