"""The saves of a run, and what it says of them; with --async-save steps go on while a checkpoint is written."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from megapipe.checkpoint import commit, retention
from megapipe.checkpoint.background import Background
from megapipe.checkpoint.save_load import save_checkpoint
from megapipe.config import CheckpointConfig
from megapipe.distributed.meeting.together import on_first
from megapipe.errors import CheckpointError
from megapipe.schedule.recipe_line import to_line
from megapipe.training.hooks import Hooks
from megapipe.training.report.job_log import JobLog
from megapipe.training.report.lines import banner
from megapipe.training.run import Run


class Saving:
    """The checkpoints of a run.

    Args:
        contents: of its data and tokenizer, as a run that goes on must find them again.
    Attributes:
        last: iteration of the newest that is complete, or of the one that the run goes on from; 0 for none.
        begun: that of the newest, complete or under way.
        own: of those in --save that this run has saved or goes on from; it removes no others unless it is told to.
    """

    def __init__(self, run: Run, hooks: Hooks, contents: Mapping[str, str]) -> None:
        self._run, self._hooks, self._contents = run, hooks, contents
        self.last = self.begun = run.progress.iteration
        wanted, possible = run.config.checkpoint.async_save, hasattr(os, "memfd_create")
        if wanted and not possible:
            run.say("WARNING: --async-save needs Linux's memory files, which this system has not: each save waits")
        writes = run.mesh.world.rank == 0
        self.jobs = JobLog(run.config, run.progress.consumed_train_samples, writes=writes)
        self._background = Background(run.mesh) if wanted and possible else None
        self._told: int | None = None  # the iteration whose failed save had an ALARM when it was noticed
        self.own = [self.last] if self.last and _one_folder(run.config.checkpoint) else []
        if run.report.speaks and (text := retention.others(run.config.checkpoint, self.own)):
            run.say(text)

    def save(self, *, last: bool = False) -> None:
        """Save, or begin to, once the one before is complete. Collective. last: the run ends with it.

        Raises: CheckpointError on all ranks if one of the two fails, unless --save-failure continue and not last.
        """
        self.finish()  # the save before is not the last one: --save-failure decides whether its failure ends the run
        run, n = self._run, self._run.progress.iteration
        directory = run.config.checkpoint.save
        assert directory is not None
        run.say(f"saving checkpoint at iteration {n:7d} to {directory} in safetensors format")
        recipe = run.plan.recipe
        made = {"recipe": to_line(recipe)} if recipe else {}
        state = dataclasses.asdict(run.progress) | {"contents": self._contents} | made
        given = directory, n, run.modules, run.optimizer, state, run.config, run.mesh, run.curve, self._background
        if self._background is not None:
            self._background.keep = self._keep
        if self._tried(partial(save_checkpoint, *given), last):
            self.begun = n
            self.jobs.saved(n, run.progress.consumed_train_samples)
            if self._background is None or self._background.under_way is None:
                newest = commit.folder_of(Path(directory), n)
                self._say(n, on_first(run.mesh, lambda: retention.retain(newest, self._keep)))
                self._complete(n)
        if last:
            self.finish(last=True)

    def look(self) -> None:
        """Say that the save under way is complete or has failed, once this rank knows."""
        if self._background is not None and (news := self._background.news()) is not None:
            n, problem, removed = news
            if problem:
                self._told = n
                self._run.say(banner("ALARM: CHECKPOINT NOT SAVED", f"iteration {n}: {problem}"))
            else:
                self._say(n, removed)

    def finish(self, *, last: bool = False) -> None:
        """Wait for the save under way. Collective, and raises as `save`."""
        if self._background is None or (n := self._background.under_way) is None:
            return
        done = self._tried(self._background.finish, last, told=self._told == n)
        if done:
            self.look()
            self._complete(n)
        else:
            self._background.news()  # told already

    def close(self) -> None:
        """Wait for this rank's part of a save under way, also where an error ends the run."""
        if self._background is not None:
            self._background.close()
            self.look()

    def _tried(self, save: Callable[[], object], last: bool, *, told: bool = False) -> bool:
        """Return whether a save was made. told: its failure has had its ALARM, and what follows from it has not."""
        try:
            save()
        except CheckpointError as error:
            if last or self._run.config.checkpoint.save_failure == "stop":
                raise
            going_on = f"going on from iteration {self.last}'s checkpoint alone until the next save"
            text = f"{going_on} (--save-failure continue)"
            self._run.say(text if told else banner("ALARM: CHECKPOINT NOT SAVED", *error.problems, text))
            return False
        return True

    @property
    def _keep(self) -> retention.Keep:
        flags = self._run.config.checkpoint
        own = None if flags.save_remove_earlier else tuple(self.own)
        return flags.save_retain_interval, flags.save_keep_last, own

    def _say(self, n: int, removed: Sequence[int]) -> None:
        """A line on the speaking rank, and one of what was removed, on the first, which knows what its writer did."""
        flags = self._run.config.checkpoint
        self._run.say(f"  successfully saved checkpoint from iteration {n:7d} to {flags.save}")
        if self._run.mesh.world.rank == 0:
            print(retention.told(removed, flags), end="", flush=True)

    def _complete(self, n: int) -> None:
        self.last = n
        self.own.append(n)
        self.jobs.complete(n)
        self._hooks.call("on_save", self._run, n)


def _one_folder(flags: CheckpointConfig) -> bool:
    return bool(flags.save and flags.load and os.path.exists(flags.save) and os.path.samefile(flags.save, flags.load))
