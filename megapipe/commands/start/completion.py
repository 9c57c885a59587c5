"""Completion of commands and flags, from the table of commands and from each command's own help.

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
    """Print the script."""
    if {"--help", "-h"} & {*argv}:
        say(_ABOUT)
    elif len(argv) != 1 or argv[0] not in SHELLS:
        raise ConfigError(f"completion takes one of {' and '.join(SHELLS)}, got {' '.join(argv) or 'none'}")
    else:
        zsh = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"
        say(zsh * (argv[0] == "zsh") + _BASH.replace("NAMES", " ".join(DOORS)))
