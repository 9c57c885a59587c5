"""Break a run at random for some minutes, let it heal, and compare its weights to the bit with a run that nobody broke.

    megapipe chaos --minutes 20 -- torchrun --nproc-per-node 4 pretrain_gpt.py <flags with --save-interval>

The launch line is started as it is, with --save and --load in a folder of its own behind it, and started again when it
ends, as a scheduler would do. What is broken are its processes on this machine and its checkpoints:

    kill    SIGKILL to a rank or to the launcher, one in two of them while a checkpoint is being written
    stop    SIGSTOP to a rank, for good: the others run into --distributed-timeout-*, so give a short one
    delay   SIGSTOP to a rank for a moment, which must cost nothing
    disk    no file may grow beyond a part of a checkpoint until the next save has met it
    damage  a file of the newest checkpoint is changed, cut or removed, and a rank killed
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
from megapipe.data.files import folder_problems
from megapipe.errors import ConfigError
from megapipe.flags.parse import parse, place_of_dashes

_EXAMPLE = "megapipe chaos --minutes 20 -- torchrun ... pretrain_gpt.py ..."
KINDS = ("kill", "stop", "delay", "disk", "damage")
GIVE_UP = 3
"""Launches in a row that end without a fault of ours and without an iteration."""
MOST = 1e6
"""Minutes of faults, and seconds between two of them, at most."""
HANGS_S, ORPHANED_S = 900.0, 30.0
"""Seconds after which a run that says nothing, and processes whose launcher is gone, count as a failure."""


@dataclass(frozen=True)
class Options:
    """A run that is broken: for how long, and how hard. Its launch line stands behind --, with --save-interval."""

    minutes: float = 10.0
    """Minutes in which faults are injected; the run that is compared with comes after them."""
    kinds: str = ",".join(KINDS)
    """The faults, with commas between."""
    every: float = 20.0
    """Seconds of sound training between two faults, on average."""
    seed: int = 1
    """The seed of the faults and their moments."""
    folder: str | None = None
    """A folder for checkpoints and logs. Default: a new one under the system's temporary folder."""


@dataclass
class Chaos:
    """A run that is broken and started again."""

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
        """Break it until the time is over or the training done. Raises: ConfigError if it does not heal."""
        until, in_vain = time.monotonic() + 60 * self.options.minutes, 0
        while time.monotonic() < until:
            run, before = self.launch(), len(self.faults)
            try:
                self.break_until(run, until)
                if time.monotonic() < until and (left := run.left_behind(ORPHANED_S)):
                    raise ConfigError(f"processes {left} outlive their launcher by {ORPHANED_S:g} s, see {run.log}")
            finally:
                code = run.end()
            if code == 0:
                return
            in_vain = 0 if run.iterations or len(self.faults) > before else in_vain + 1
            if in_vain == GIVE_UP:
                raise ConfigError(f"the run does not heal: {GIVE_UP} launches in a row came to nothing, see {run.log}")

    def launch(self) -> Launched:
        self.launches += 1
        return Launched(with_folder(self.command, self.save), self.root / f"launch-{self.launches:03d}.log")

    def break_until(self, run: Launched, until: float) -> None:
        """One fault after another, each once an iteration has come after the one before."""
        at_start = self.draw.random() < 0.1
        while run.poll() is None and time.monotonic() < until:
            if at_start and "kill" in self.kinds:  # while it is imported, meets or loads
                run.waits(self.draw.uniform(0, 10), until)
                self.inject("kill", run)
                at_start = False
            seen, patience = len(run.iterations), time.monotonic() + HANGS_S
            while run.poll() is None and len(run.iterations) == seen:
                if time.monotonic() > patience:
                    raise ConfigError(f"the run hangs: no iteration for {HANGS_S:g} s, see {run.log}")
                time.sleep(0.02)
            for fault in self.faults:
                fault.look(run)
            if run.waits(self.draw.expovariate(1 / self.options.every), until):
                self.inject(self.draw.choice(self.kinds), run)

    def inject(self, kind: str, run: Launched) -> None:
        """One fault, if there is something to break."""
        fault = Fault(kind, run)
        breaks: Callable[[Launched], str] = getattr(self, kind)
        if detail := breaks(run):
            if kind != "disk":
                fault.now()
            self.faults.append(fault)
            print(f"{time.strftime('%H:%M:%S')} iteration {fault.iteration}: {kind}, {detail}", flush=True)
            fault.watch(ends=kind not in ("delay", "disk"))

    def kill(self, run: Launched) -> str:
        where = "in a step"
        if self.draw.random() < 0.5 and run.sees(lambda: any(self.save.glob("iter_*.tmp-*")), 30):
            where = "in a save"
            time.sleep(self.draw.random() * 0.05)
        return run.hit(self.draw, signal.SIGKILL, launcher=self.draw.random() < 0.3, where=where)

    def stop(self, run: Launched) -> str:
        return run.hit(self.draw, signal.SIGSTOP)

    def delay(self, run: Launched) -> str:
        seconds = self.draw.uniform(0.1, 2.0)
        text: str = run.hit(self.draw, signal.SIGSTOP)
        time.sleep(seconds)
        run.signal_all(signal.SIGCONT)
        return text and f"{text}, {seconds:.1f} s"

    def disk(self, run: Launched) -> str:
        sizes = [path.stat().st_size for path in self.save.glob("iter_*/*.safetensors")]
        saves = run.saves
        if not sizes:
            return ""
        limit = int(self.draw.random() * max(sizes))
        for pid in run.ranks():
            with suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        run.sees(lambda: run.saves > saves or run.failed_saves > 0, 60 + 5 * self.options.every)
        for pid in run.ranks():
            with suppress(ProcessLookupError, PermissionError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        return f"files of at most {limit:,} bytes"

    def damage(self, run: Launched) -> str:
        sound = newest_sound(self.save)
        if sound is None or len(list(self.save.glob("iter_???????"))) < 2:
            return ""  # the only one: a user would lose all
        path = self.draw.choice(sorted(p for p in sound.iterdir() if p.is_file()))
        how = self.draw.choice((_flip, _cut, _unlink))
        with suppress(OSError):  # --save-keep-last removed it meanwhile
            how(path)
        where = f"after {how.__name__.strip('_')} {sound.name}/{path.name}"
        return run.hit(self.draw, signal.SIGKILL, where=where)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _unlink(path: Path) -> None:
    path.unlink()


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def with_folder(command: Sequence[str], folder: Path) -> list[str]:
    """The launch line with checkpoints in a folder of ours; a flag given twice counts the second time."""
    return [*command, "--save", str(folder), "--load", str(folder), "--log-interval", "1"]


def report(chaos: Chaos, minutes: float) -> None:
    """A table of what was injected, when it was noticed, what it cost."""
    print(f"\n{len(chaos.faults)} faults and {chaos.launches} launches in {minutes:.1f} minutes")
    print("kind      faults  noticed within s  trains again within s  iterations trained again")
    for kind in chaos.kinds:
        of_kind = [fault for fault in chaos.faults if fault.kind == kind]
        noticed = max((fault.noticed_s for fault in of_kind if fault.noticed_s is not None), default=0.0)
        again = max((fault.healed_s for fault in of_kind if fault.healed_s is not None), default=0.0)
        lost = sum(fault.lost for fault in of_kind)
        print(f"{kind:8}  {len(of_kind):6}  {noticed:16.1f}  {again:21.1f}  {lost:24}")


def compare(chaos: Chaos) -> bool:
    """Train the same flags once more, unbroken, to the newest checkpoint's iteration; say what differs."""
    sound = newest_sound(chaos.save)
    if sound is None:
        raise ConfigError("no checkpoint is there to compare; give a smaller --save-interval, or more --minutes")
    iteration, whole = int(sound.name.removeprefix("iter_")), chaos.root / "unbroken"
    print(f"comparing {sound} with a run that nobody breaks", flush=True)
    command = [*with_folder(chaos.command, whole), "--exit-interval", str(iteration)]
    run = Launched(command, chaos.root / "unbroken.log")
    if run.wait() != 0:
        raise ConfigError(f"the unbroken run ends with {run.poll()}, see {run.log}")
    tensors, differing = difference(sound, whole / sound.name)
    losses, others = numbers(chaos.root, run.log, iteration)
    print(f"iteration {iteration}: {tensors} tensors, {len(differing)} differ{': ' if differing else ''}", end="")
    print(f"{', '.join(differing[:5])}; {losses} printed losses and norms, {len(others)} differ {others[:5] or ''}")
    return not differing and not others


def _problems(options: Options) -> Iterator[str]:
    """What is wrong with the flags, before anything starts."""
    for name in ("minutes", "every"):
        number = getattr(options, name)
        if not 0 < number <= MOST:
            yield f"--{name} {number:g} must be above 0 and at most {MOST:g}"
    for kind in dict.fromkeys(options.kinds.split(",")):
        if kind not in KINDS:
            yield f"--kinds {options.kinds}: {kind or 'an empty name'} is none of {', '.join(KINDS)}"
    yield from folder_problems({"--folder": options.folder})


def main(argv: Sequence[str]) -> int:
    """Exit status: 0 if the weights are equal to the bit."""
    at = place_of_dashes(argv, _EXAMPLE)
    options, command = parse(Options, argv[:at]), [*argv[at + 1 :]]
    if not command:
        raise ConfigError(f"give the launch line after --, as in {_EXAMPLE}")
    if "--save-interval" not in command:
        raise ConfigError("the launch line has no --save-interval, so that nothing would be left to go on from")
    if problems := list(_problems(options)):
        raise ConfigError(problems)
    root = Path(options.folder or mkdtemp(prefix="chaos-"))
    root.mkdir(parents=True, exist_ok=True)
    if (root / "broken").exists():
        raise ConfigError(f"--folder {root} has a run already. Name another, {root}-{secrets.token_hex(2)}")
    print(f"{shlex.join(command)}\nfolder {root}, seed {options.seed}", flush=True)
    chaos, started = Chaos(options, command, root), time.monotonic()
    chaos.run()
    report(chaos, (time.monotonic() - started) / 60)
    return 0 if compare(chaos) else 1
