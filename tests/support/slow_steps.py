"""pretrain_gpt.py whose steps take a while, of which the processor has nothing."""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from megapipe.training.driver import Driver
from pretrain_gpt import main

step = Driver.whole


def slow_step(self):
    time.sleep(0.05)
    return step(self)


Driver.whole = slow_step
main()
