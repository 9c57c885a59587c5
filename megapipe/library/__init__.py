"""Functions for programs and notebooks that have no function of the same use in another room.

`megapipe` names all of them. `schedules` needs no torch, and `runs` is about configurations.
"""
