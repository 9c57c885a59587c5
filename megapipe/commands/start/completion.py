"""Print a script that completes the names of commands and their flags in a shell.

eval "$(megapipe completion bash)"
"""

from __future__ import annotations

from collections.abc import Sequence

from megapipe.doors import DOORS
from megapipe.errors import ConfigError
from megapipe.flags.stop import say

SHELLS = ("bash", "zsh")
_ABOUT = """usage: megapipe completion bash|zsh

Prints a script that completes commands and flags. For every new shell, in ~/.bashrc or ~/.zshrc:
  eval "$(megapipe completion bash)\""""
# The flags are read from `--help` at each completion, so that they are never out of date.
_BASH = """_megapipe() {
  local word="${COMP_WORDS[COMP_CWORD]}"
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "NAMES" -- "$word"))
  elif [ "${word:0:1}" = - ]; then
    COMPREPLY=($(compgen -W "$(COLUMNS=80 megapipe "${COMP_WORDS[1]}" --help 2> /dev/null |
      grep -oE '^ +(-h, )?--[A-Za-z0-9_-]+' | grep -oE -- '--.*')" -- "$word"))
  fi
}
complete -o default -F _megapipe megapipe"""


def main(argv: Sequence[str]) -> None:
    """Print the script for the shell that `argv` names.

    Raises: ConfigError for another word, or none.
    """
    if {"--help", "-h"} & {*argv}:
        say(_ABOUT)
    elif len(argv) != 1 or argv[0] not in SHELLS:
        raise ConfigError(
            f"completion takes bash or zsh, got {' '.join(argv) or 'none'}. "
            'Add this line to ~/.bashrc: eval "$(megapipe completion bash)"'
        )
    else:
        if argv[0] == "zsh":
            # zsh runs completions of bash after these two lines.
            say("autoload -U +X compinit && compinit")
            say("autoload -U +X bashcompinit && bashcompinit")
        say(_BASH.replace("NAMES", " ".join(DOORS)))
