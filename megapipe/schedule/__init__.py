"""Pipeline schedules as data. Pure Python: works without torch."""

from megapipe.errors import ScheduleError
from megapipe.schedule.catalogue import SCHEDULES, build, entry_of, is_file
from megapipe.schedule.costs import Costs
from megapipe.schedule.dependencies import share_of_window
from megapipe.schedule.generators.classic import gpipe, naive, one_f_one_b
from megapipe.schedule.generators.recorder import Recorder
from megapipe.schedule.lower import Exchange, Message, Program, forward_only, lower
from megapipe.schedule.passes import Kind, Pass, Placement, Schedule, Step, unpaired
from megapipe.schedule.patterns import Entry
from megapipe.schedule.placement import loop, mirror, vee, wave
from megapipe.schedule.simulate import Timeline, simulate
from megapipe.schedule.text import from_csv, from_json, load, to_csv, to_json
from megapipe.schedule.verify import verify, verify_programs
