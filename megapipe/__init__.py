"""Pretrain GPT models under any pipeline schedule.

    import megapipe as mp

    table = mp.build("zb-h1", ranks=4, microbatches=8)     # a notebook shows its picture
    mp.simulate(table, mp.Costs(f=10, b=11, w=8)).bubble
    mp.compare(4, 8, ["1f1b", "zb-h1", "zb-v"])            # a table

Schedules, which need no torch (megapipe.schedule has more):

    build        a Schedule by its name, from a file or function, or of a Recipe
    Recipe       how a schedule is made: its order, slices, pairs, offload, sharding, ...
    Costs        times of passes and messages, and what passes hold
    simulate     the time and memory of each rank
    verify       raise ScheduleError for a schedule that cannot run
    draw         a picture, here or in a .svg, .png or .pdf
    compare      a Comparison: schedules side by side, and which to take
    load, save   .json and .csv files

Runs:

    Config       everything that a run is made of; its fields are Megatron-LM's flags
    parse        flags to a Config: mp.parse(mp.Config, ["--num-layers", "12", ...])
    check        what would run, or everything that a launch would refuse
    make_plan    stages, layers, time and memory of a run, as a Plan
    pretrain     train: on each process that torchrun starts, or in this one alone

    get_forward_backward_func, P2PCommunicator, ProcessMesh   Megatron-LM's step, for your own loop

Each name is imported when it is first used. help(mp.build) has its arguments, docs/library.md an
hour of examples, docs/extending.md what can be replaced, and `megapipe --help` the commands.
"""

import typing

from megapipe import moved as _moved

if typing.TYPE_CHECKING:
    # The same names as in _ROOMS: type checkers read these lines, and Python those below.
    from megapipe.config import Config as Config
    from megapipe.distributed.mesh import ProcessMesh as ProcessMesh
    from megapipe.flags.parse import parse as parse
    from megapipe.library.runs import check as check
    from megapipe.library.runs import make_plan as make_plan
    from megapipe.library.schedules import build as build
    from megapipe.library.schedules import compare as compare
    from megapipe.library.schedules import draw as draw
    from megapipe.library.schedules import save as save
    from megapipe.pipeline_parallel.contracts.forward_backward import (
        get_forward_backward_func as get_forward_backward_func,
    )
    from megapipe.pipeline_parallel.contracts.p2p import P2PCommunicator as P2PCommunicator
    from megapipe.plan import Plan as Plan
    from megapipe.schedule.costs import Costs as Costs
    from megapipe.schedule.passes import Schedule as Schedule
    from megapipe.schedule.recipe import Recipe as Recipe
    from megapipe.schedule.simulate import simulate as simulate
    from megapipe.schedule.text import load as load
    from megapipe.schedule.verify import verify as verify
    from megapipe.schedule.views.study import Comparison as Comparison
    from megapipe.training.pretrain import pretrain as pretrain

    __version__ = ""

_ROOMS = {
    "config": ("Config",),
    "distributed.mesh": ("ProcessMesh",),
    "flags.parse": ("parse",),
    "library.runs": ("check", "make_plan"),
    "library.schedules": ("build", "compare", "draw", "save"),
    "pipeline_parallel.contracts.forward_backward": ("get_forward_backward_func",),
    "pipeline_parallel.contracts.p2p": ("P2PCommunicator",),
    "plan": ("Plan",),
    "schedule.costs": ("Costs",),
    "schedule.passes": ("Schedule",),
    "schedule.recipe": ("Recipe",),
    "schedule.simulate": ("simulate",),
    "schedule.text": ("load",),
    "schedule.verify": ("verify",),
    "schedule.views.study": ("Comparison",),
    "training.pretrain": ("pretrain",),
}
_MODULES = {name: module for module, names in _ROOMS.items() for name in names}

if not typing.TYPE_CHECKING:
    # Hidden from type checkers, which would take any misspelled name for a name of this module.

    def __getattr__(name: str) -> typing.Any:
        """Import a name when it is first used. Raises: AttributeError if there is none."""
        if name == "__version__":
            from megapipe.doors import version

            return version()
        if name not in _MODULES:
            raise AttributeError(
                f"module 'megapipe' has no attribute {name!r}; "
                "a part of it is imported by name, such as megapipe.schedule"
            )
        from importlib import import_module

        found = getattr(import_module(f"megapipe.{_MODULES[name]}"), name)
        # The next use does not come here.
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        """Return all names, used already or not, for completion and help()."""
        return sorted({*globals(), *_MODULES, "__version__"})


_moved.install()
