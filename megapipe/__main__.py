"""Run `python -m megapipe`: the command megapipe, where the shell does not find it."""

from megapipe.commands.main import main

if __name__ == "__main__":
    main()
