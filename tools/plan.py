"""`megapipe plan` in a clone: the command in megapipe/commands/plan/main.py."""

import sys
from pathlib import Path

# A fresh clone runs it before anything is installed.
sys.path.insert(0, str(Path(__file__).parents[1]))

from megapipe.commands.main import door

if __name__ == "__main__":
    door("plan")
