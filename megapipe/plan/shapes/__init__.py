"""The shapes of tables that a plan knows. A new one is a file here and a place in the list."""

from megapipe.plan.shapes.pairs import PAIRS
from megapipe.plan.shapes.slices import SLICES

SHAPES = SLICES, PAIRS
