"""Break a run at random for some minutes, let it recover, and compare it with an unbroken run.

    megapipe chaos --minutes 20 -- torchrun --nproc-per-node 4 pretrain_gpt.py FLAGS...

FLAGS need --save-interval. The launch line is started as given, with --save and --load of a new
folder added. It is started again whenever it ends, as a scheduler would do. At the end, weights and
printed numbers must equal the unbroken run's bit by bit. These faults hit the processes of the run
on this machine, and its checkpoints:

    kill: SIGKILL to a rank or to the launcher, half of them while a checkpoint is written
    stop: SIGSTOP to a rank for good. The others run into --distributed-timeout-*: give a short one.
    delay: SIGSTOP to a rank for at most two seconds, which must cost nothing
    disk: no file may grow beyond a part of a checkpoint, until the next save has failed or passed
    damage: a file of the newest checkpoint is changed, cut or removed, and a rank killed

With --non-persistent-ckpt-type local of a run on this machine, --kinds may have these too:

    node: SIGKILL to a rank, and its memory is lost, as with its machine
    pair: the same, also to the ranks that keep copies of its state
    flip: as node, and a byte is changed in each copy of its state
"""

from __future__ import annotations

import os
import random
import resource
import secrets
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp

from megapipe.commands.chaos.broken_run import Fault, Launched, difference, newest_sound, numbers
from megapipe.commands.chaos.memory import lose
from megapipe.data.files import folder_problems
from megapipe.errors import ConfigError
from megapipe.flags.parse import parse, place_of_dashes

# Errors show this line to paste.
_EXAMPLE = "megapipe chaos --minutes 20 -- torchrun ... pretrain_gpt.py ..."
KINDS = ("kill", "stop", "delay", "disk", "damage")
IN_MEMORY = ("node", "pair", "flip")
"""Kinds that are not drawn unless --kinds names them."""
GIVE_UP = 3
"""Launches in a row that end without an injected fault and without an iteration."""
MOST = 1e6
"""The largest --minutes and --every."""
HANGS_S = 900.0
"""A run without an iteration for this many seconds hangs."""
ORPHANED_S = 30.0
"""Ranks may live for this many seconds after their launcher has ended."""


@dataclass(frozen=True)
class Options:
    """Break a run at random, let it recover, and compare it bit by bit with an unbroken run.

    The launch line of the run stands after --, and needs --save-interval.
    """

    minutes: float = 10.0
    """Minutes in which faults are injected. The unbroken run comes after them."""
    kinds: str = ",".join(KINDS)
    """The kinds of faults, separated by commas."""
    every: float = 20.0
    """Seconds of undisturbed training between two faults, on average."""
    seed: int = 1
    """Seed of the faults and their times."""
    folder: str | None = None
    """Folder for checkpoints and logs. Default: a new one in the system's temporary folder."""


@dataclass
class Chaos:
    """A run that is broken again and again, and started anew if it has ended.

    `run` breaks until the time is over. Each kind of fault has a method of its name, such as
    `kill`, which returns a line for the log; "" if there was nothing to break.

    Attributes:
        options: the flags of the command.
        command: the launch line.
        root: the folder for logs and checkpoints.
        faults: all faults so far.
        launches: how often the command was started.
    """

    options: Options
    command: list[str]
    root: Path
    faults: list[Fault] = field(default_factory=list)
    launches: int = 0

    def __post_init__(self) -> None:
        self.draw = random.Random(self.options.seed)
        self.kinds = tuple(self.options.kinds.split(","))
        self.save = self.root / "broken"

    def run(self) -> None:
        """Break the run until the time is over or its training is complete.

        Raises: ConfigError if it does not recover, hangs, or leaves processes.
        """
        until = time.monotonic() + 60 * self.options.minutes
        # Launches in a row that came to nothing, without a fault to blame.
        in_vain = 0
        while time.monotonic() < until:
            faults_before = len(self.faults)
            run = self.launch()
            try:
                self.break_until(run, until)
                if time.monotonic() < until and (left := run.orphans(ORPHANED_S)):
                    raise ConfigError(
                        f"processes {left} outlive their launcher by {ORPHANED_S:g} s, "
                        f"see {run.log}"
                    )
            finally:
                # Ranks of this launch must not train next to the ranks of the next one.
                code = run.end()
            # The training is complete, and there is nothing left to break.
            if code == 0:
                return
            if run.iterations or len(self.faults) > faults_before:
                in_vain = 0
            else:
                in_vain += 1
            if in_vain == GIVE_UP:
                raise ConfigError(
                    f"the run does not recover: {GIVE_UP} launches in a row ended without an "
                    f"iteration, see {run.log}"
                )

    def launch(self) -> Launched:
        """Start the command once more, with a log of its own."""
        self.launches += 1
        log = self.root / f"launch-{self.launches:03d}.log"
        return Launched(with_folder(self.command, self.save), log)

    def break_until(self, run: Launched, until: float) -> None:
        """Inject one fault after another, with at least one iteration between two faults.

        Args:
            run: the launch to break.
            until: the time of time.monotonic() at which to stop.
        """
        at_start = self.draw.random() < 0.1
        while run.poll() is None and time.monotonic() < until:
            # One launch in ten is hit while it imports, while its ranks meet, or while it loads.
            if at_start and "kill" in self.kinds:
                run.trains(self.draw.uniform(0, 10), until)
                self.inject("kill", run)
                at_start = False
            # The run must have recovered from the last fault before the next one.
            seen = len(run.iterations)
            hangs_at = time.monotonic() + HANGS_S
            while run.poll() is None and len(run.iterations) == seen:
                if time.monotonic() > hangs_at:
                    raise ConfigError(
                        f"the run hangs: no iteration for {HANGS_S:g} s, see {run.log}"
                    )
                time.sleep(0.02)
            for fault in self.faults:
                fault.look(run)
            # Random times from fault to fault, independent of each other, hit every moment of a
            # step and a save.
            if run.trains(self.draw.expovariate(1 / self.options.every), until):
                self.inject(self.draw.choice(self.kinds), run)

    def inject(self, kind: str, run: Launched) -> None:
        """Inject one fault of a kind and print it. Do nothing if there is nothing to break.

        Args:
            kind: a name of KINDS or IN_MEMORY, such as "kill".
            run: the launch to break.
        """
        fault = Fault(kind, run)
        breaks: Callable[[Launched], str] = getattr(self, kind)
        if detail := breaks(run):
            # A full disk is noticed while `disk` waits for the save; any other fault afterwards.
            if kind != "disk":
                fault.now()
            self.faults.append(fault)
            now = time.strftime("%H:%M:%S")
            print(f"{now} iteration {fault.iteration}: {kind}, {detail}", flush=True)
            fault.watch(ends=kind not in ("delay", "disk"))

    # Each method below injects the fault of its name. It returns a text for the log, or an empty
    # one if there was nothing to break.

    def kill(self, run: Launched) -> str:
        """Kill a random rank, or the launcher; half of the time while a checkpoint is written."""
        where = "in a step"
        # A folder iter_*.tmp-* exists as long as a checkpoint is being written.
        if self.draw.random() < 0.5 and run.sees(lambda: any(self.save.glob("iter_*.tmp-*")), 30):
            where = "in a save"
            time.sleep(self.draw.random() * 0.05)
        return run.hit(self.draw, signal.SIGKILL, launcher=self.draw.random() < 0.3, where=where)

    def stop(self, run: Launched) -> str:
        """Stop a random rank by SIGSTOP, and never continue it."""
        return run.hit(self.draw, signal.SIGSTOP)

    def delay(self, run: Launched) -> str:
        """Stop a random rank by SIGSTOP, and continue it after at most two seconds."""
        # A delay must cost nothing, so it is shorter than the usual timeouts.
        seconds = self.draw.uniform(0.1, 2.0)
        text: str = run.hit(self.draw, signal.SIGSTOP)
        time.sleep(seconds)
        run.signal_all(signal.SIGCONT)
        return text and f"{text}, {seconds:.1f} s"

    def disk(self, run: Launched) -> str:
        """Limit file sizes (RLIMIT_FSIZE), as a full disk would, until a save fails or passes."""
        sizes = [path.stat().st_size for path in self.save.glob("iter_*/*.safetensors")]
        if not sizes:
            return ""
        saves = run.saves
        failed = run.failed_saves
        limit = int(self.draw.random() * max(sizes))
        # A write beyond the limit fails as one on a full disk does. Only the soft limit is
        # lowered: raising a hard one again needs privileges.
        for pid in run.ranks():
            with suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        # An earlier save of this launch may have failed: --save-failure continue goes on after it.
        run.sees(
            lambda: run.saves > saves or run.failed_saves > failed, 60 + 5 * self.options.every
        )
        # The disk has room again. The ranks may have failed and ended in the meantime.
        for pid in run.ranks():
            with suppress(ProcessLookupError, PermissionError):
                resource.prlimit(
                    pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
                )
        return f"files of at most {limit:,} bytes"

    def damage(self, run: Launched) -> str:
        """Change, cut or remove a file of the newest checkpoint, and kill a random rank.

        Nothing happens if there are fewer than two checkpoints.
        """
        sound = newest_sound(self.save)
        # Without a second checkpoint the run could only start from the beginning.
        if sound is None or len(list(self.save.glob("iter_???????"))) < 2:
            return ""
        path = self.draw.choice(sorted(p for p in sound.iterdir() if p.is_file()))
        how = self.draw.choice((_flip, _cut, _unlink))
        # --save-keep-last may have removed the checkpoint in the meantime.
        with suppress(OSError):
            how(path)
        where = f"after {how.__name__.strip('_')} {sound.name}/{path.name}"
        return run.hit(self.draw, signal.SIGKILL, where=where)

    def node(self, run: Launched) -> str:
        """Kill a random rank, and delete the training states that it keeps in shared memory."""
        return lose(run, self.draw)

    def pair(self, run: Launched) -> str:
        """Kill a random rank and the ranks with copies of its state, and delete these states."""
        return lose(run, self.draw, pair=True)

    def flip(self, run: Launched) -> str:
        """Kill a random rank, delete its states in memory, and damage the copies on others."""
        return lose(run, self.draw, flip=True)


def _flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _unlink(path: Path) -> None:
    """Remove a file."""
    path.unlink()


def _cut(path: Path) -> None:
    """Cut a file to half its length."""
    os.truncate(path, path.stat().st_size // 2)


def with_folder(command: Sequence[str], folder: Path) -> list[str]:
    """Return the launch line with --save and --load of `folder`, and --log-interval 1.

    Args:
        command: the user's launch line; these three flags in it have no effect any more.
    """
    # Of a flag that is given twice, the last counts.
    return [*command, "--save", str(folder), "--load", str(folder), "--log-interval", "1"]


def report(chaos: Chaos, minutes: float) -> None:
    """Print a table of the faults: how many, how soon they were noticed, and their cost.

    Args:
        minutes: how long faults were injected.
    """
    print(f"\n{len(chaos.faults)} faults and {chaos.launches} launches in {minutes:.1f} minutes")
    print("kind      faults  noticed within s  trains again within s  iterations trained again")
    for kind in chaos.kinds:
        of_kind = [fault for fault in chaos.faults if fault.kind == kind]
        noticed = max((fault.noticed_s or 0.0 for fault in of_kind), default=0.0)
        again = max((fault.healed_s or 0.0 for fault in of_kind), default=0.0)
        lost = sum(fault.lost for fault in of_kind)
        print(f"{kind:8}  {len(of_kind):6}  {noticed:16.1f}  {again:21.1f}  {lost:24}")


def compare(chaos: Chaos) -> bool:
    """Run the same training without faults, and print where the broken run differs.

    Both are compared at the iteration of the newest undamaged checkpoint.
    Returns: whether weights and printed numbers are bitwise equal.
    Raises: ConfigError if there is no such checkpoint, or if the run without faults fails.
    """
    sound = newest_sound(chaos.save)
    if sound is None:
        raise ConfigError(
            "the broken run left no complete checkpoint to compare. "
            "Give a smaller --save-interval, or more --minutes."
        )
    iteration = int(sound.name.removeprefix("iter_"))
    unbroken = chaos.root / "unbroken"
    print(f"comparing {sound} with a run that nobody breaks", flush=True)
    # It ends at the iteration of that checkpoint, and saves its own then.
    command = [*with_folder(chaos.command, unbroken), "--exit-interval", str(iteration)]
    run = Launched(command, chaos.root / "unbroken.log")
    try:
        status = run.wait()
    finally:
        run.end()  # Ctrl-C while it waits would leave its processes alive
    if status != 0:
        raise ConfigError(f"the unbroken run ends with exit status {status}, see {run.log}")
    tensors, differing = difference(sound, unbroken / sound.name)
    losses, others = numbers(chaos.root, run.log, iteration)
    text = f"iteration {iteration}: {tensors} tensors, {len(differing)} differ"
    if differing:
        text += f": {', '.join(differing[:5])}"
    text += f"; {losses} printed losses and norms, {len(others)} differ"
    if others:
        text += f" {others[:5]}"
    print(text)
    return not differing and not others


def _problems(options: Options) -> Iterator[str]:
    """Yield a text for each wrong flag."""
    for name in ("minutes", "every"):
        number = getattr(options, name)
        if not 0 < number <= MOST:
            yield f"--{name} {number:g} must be above 0 and at most {MOST:g}"
    for kind in dict.fromkeys(options.kinds.split(",")):
        if kind not in (*KINDS, *IN_MEMORY):
            named = kind or "an empty name"
            known = ", ".join((*KINDS, *IN_MEMORY))
            yield f"--kinds {options.kinds}: {named} is none of {known}"
    yield from folder_problems({"--folder": options.folder})


def main(argv: Sequence[str]) -> int:
    """Break the run for some minutes and compare it with an unbroken one.

    Args:
        argv: the flags of the command, --, and the launch line.
    Returns: exit status 0 if weights and printed numbers are bitwise equal, else 1.
    Raises: ConfigError for wrong flags, and for a run that does not recover.
    """
    at = place_of_dashes(argv, _EXAMPLE)
    options = parse(Options, argv[:at])
    command = [*argv[at + 1 :]]
    if not command:
        raise ConfigError(f"give the launch line after --, as in {_EXAMPLE}")
    if not any(word.partition("=")[0] == "--save-interval" for word in command):
        raise ConfigError(
            "the launch line has no --save-interval, and without a checkpoint a broken run starts "
            "from the beginning. Add --save-interval 10."
        )
    if problems := list(_problems(options)):
        raise ConfigError(problems)
    root = Path(options.folder or mkdtemp(prefix="chaos-"))
    root.mkdir(parents=True, exist_ok=True)
    # The run would continue from these checkpoints, whose flags may be others.
    if (root / "broken").exists():
        raise ConfigError(
            f"--folder {root} already holds a run. "
            f"Give another, such as --folder {root}-{secrets.token_hex(2)}"
        )
    print(f"{shlex.join(command)}\nfolder {root}, seed {options.seed}", flush=True)
    chaos = Chaos(options, command, root)
    started = time.monotonic()
    chaos.run()
    report(chaos, (time.monotonic() - started) / 60)
    return 0 if compare(chaos) else 1
