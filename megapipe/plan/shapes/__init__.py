"""The features that change all passes: slices and pairs. A new one is a file and in the list."""

from megapipe.plan.shapes.pairs import PAIRS
from megapipe.plan.shapes.slices import SLICES

SHAPES = SLICES, PAIRS
