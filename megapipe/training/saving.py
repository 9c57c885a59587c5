"""Save checkpoints during a run and report them.

With --async-save, steps go on while a checkpoint is written.
"""

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
    """Saves the checkpoints of a run.

    `save` saves, or with --async-save begins to. `look` reports a save in the background once this
    rank knows how it ended. `finish` waits for it on all ranks, `close` on this rank alone.

    Args:
        run: this rank's part of the run.
        hooks: changes that the user's program makes to the run.
        contents: digests of data and tokenizer, which a resumed run compares.
        last: iteration of the checkpoint that the run has loaded; 0 for none. If it has gone back
            to a state in memory, iteration of the newest checkpoint in --save.

    Attributes:
        last: iteration of the newest complete checkpoint, or of the loaded one; 0 for none.
        begun: iteration of the newest checkpoint, complete or being written.
        own: iterations in --save that this run has saved or loaded. Only these are removed, unless
            --save-remove-earlier is given.
    """

    def __init__(self, run: Run, hooks: Hooks, contents: Mapping[str, str], last: int) -> None:
        self._run = run
        self._hooks = hooks
        self._contents = contents
        self.last = self.begun = last
        flags = run.config.checkpoint
        possible = hasattr(os, "memfd_create")
        if flags.async_save and not possible:
            run.say(
                "WARNING: --async-save needs Linux's memory files, which this system has not: each "
                "save waits"
            )
        writes = run.mesh.world.rank == 0
        self.jobs = JobLog(run.config, run.progress.consumed_train_samples, writes=writes)
        self._background: Background | None = None
        if flags.async_save and possible:
            self._background = Background(run.mesh)
        # The iteration whose failed save has been reported with an ALARM already.
        self._alarmed: int | None = None
        self.own = [self.last] if self.last and _one_folder(flags) else []
        if run.report.speaks:
            text = retention.others(flags, self.own)
            if text:
                run.say(text)

    def save(self, *, last: bool = False) -> None:
        """Save, or begin to save in the background. Collective over the world.

        A background save that is still under way is completed first.

        Args:
            last: the run ends with this save.
        Raises: CheckpointError on all ranks if one of the two saves fails, except with
            --save-failure continue before the last save.
        """
        # Without `last`: --save-failure decides whether a failure of the save before ends the run.
        self.finish()
        run = self._run
        n = run.progress.iteration
        directory = run.config.checkpoint.save
        assert directory is not None
        # Megatron-LM's line.
        run.say(f"saving checkpoint at iteration {n:7d} to {directory} in safetensors format")
        state = dataclasses.asdict(run.progress) | {"contents": self._contents}
        if run.plan.recipe:
            state["recipe"] = to_line(run.plan.recipe)
        # The writer in the background removes old checkpoints itself, once the new one is complete.
        if self._background is not None:
            self._background.keep = self._keep
        save = partial(
            save_checkpoint,
            directory,
            n,
            run.modules,
            run.optimizer,
            state,
            run.config,
            run.mesh,
            run.curve,
            self._background,
        )
        if self._tried(save, last):
            self.begun = n
            self.jobs.saved(n, run.progress.consumed_train_samples)
            # The first save of a run is never in the background, see checkpoint/background.py.
            if self._background is None or self._background.under_way is None:
                newest = commit.folder_of(Path(directory), n)
                # Older checkpoints may go only now that the new one is complete.
                self._say(n, on_first(run.mesh, lambda: retention.retain(newest, self._keep)))
                self._complete(n)
        if last:
            self.finish(last=True)

    def look(self) -> None:
        """Report how a background save has ended, if this rank knows that by now."""
        news = None if self._background is None else self._background.news()
        if news is None:
            return
        n, problem, removed = news
        if problem:
            self._alarmed = n
            self._run.say(banner("ALARM: CHECKPOINT NOT SAVED", f"iteration {n}: {problem}"))
        else:
            self._say(n, removed)

    def finish(self, *, last: bool = False) -> None:
        """Wait for a background save. Collective over the world.

        Args:
            last: the run ends with this save.
        Raises: CheckpointError on all ranks if it fails, except with --save-failure continue
            before the last save.
        """
        if self._background is None:
            return
        n = self._background.under_way
        if n is None:
            return
        if self._tried(self._background.finish, last, alarmed=self._alarmed == n):
            self.look()
            self._complete(n)
        else:
            # `_tried` has reported it.
            self._background.news()

    def close(self) -> None:
        """Wait for this rank's part of a background save, also if an error ends the run."""
        if self._background is not None:
            self._background.close()
            self.look()

    def _tried(self, save: Callable[[], object], last: bool, *, alarmed: bool = False) -> bool:
        """Call a function that saves; return whether it succeeded, and print a failure.

        Args:
            save: saves, or waits for a save.
            last: whether the run ends with this save. A failure then raises in any case.
            alarmed: whether a warning of this failure was printed before. Only the consequence is
                printed then.
        Raises: CheckpointError for a failure that ends the run.
        """
        try:
            save()
        except CheckpointError as error:
            if last or self._run.config.checkpoint.save_failure == "stop":
                raise
            text = (
                f"going on from iteration {self.last}'s checkpoint alone until the next save "
                "(--save-failure continue)"
            )
            if not alarmed:
                text = banner("ALARM: CHECKPOINT NOT SAVED", *error.problems, text)
            self._run.say(text)
            return False
        return True

    @property
    def _keep(self) -> retention.Keep:
        flags = self._run.config.checkpoint
        # None allows the removal of every iteration, also of earlier runs.
        own = None if flags.save_remove_earlier else tuple(self.own)
        return flags.save_retain_interval, flags.save_keep_last, own

    def _say(self, n: int, removed: Sequence[int]) -> None:
        """Print that the checkpoint of iteration n is complete.

        removed: iterations whose checkpoints were removed afterwards.
        """
        flags = self._run.config.checkpoint
        self._run.say(f"  successfully saved checkpoint from iteration {n:7d} to {flags.save}")
        # Only the first rank knows what its writer has removed.
        if self._run.mesh.world.rank == 0:
            print(retention.removed_lines(removed, flags), end="", flush=True)

    def _complete(self, n: int) -> None:
        """Note that the checkpoint of iteration n is complete, and call the callbacks."""
        # Not before: an error names this iteration as the one that a user can go back to.
        self.last = n
        self.own.append(n)
        self.jobs.complete(n)
        self._hooks.call("on_save", self._run, n)


def _one_folder(flags: CheckpointConfig) -> bool:
    """Return whether --save and --load are the same existing folder."""
    if not flags.save or not flags.load or not os.path.exists(flags.save):
        return False
    return os.path.samefile(flags.save, flags.load)
