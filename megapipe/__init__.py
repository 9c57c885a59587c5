"""Pretrain GPT models under any pipeline schedule.

`megapipe.schedule` builds, verifies and simulates schedules without torch; `megapipe.training.pretrain` trains a model.
`docs/extending.md` lists what can be replaced, and `megapipe --help` the commands.
"""


def __getattr__(name: str) -> str:
    """Look up `__version__` when it is asked for, as most that import a part do not."""
    if name != "__version__":
        raise AttributeError(
            f"module 'megapipe' has no attribute {name!r}; a part of it is imported by name, such as megapipe.schedule"
        )
    from megapipe.doors import version

    return version()
