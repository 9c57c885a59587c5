"""The plan of a run: the rank and the layers of each stage, and its predicted costs."""

from megapipe.plan.layers import Work
from megapipe.plan.make import balanced_by_cost, make_plan, pieces_of, plan_of, with_batch
from megapipe.plan.pieces import ModelWork, pieces
from megapipe.plan.plan import Plan, sharing
from megapipe.plan.recipes import recipe_of, schedule_of, step_of, whole_step
from megapipe.plan.shapes.slices import in_words
from megapipe.plan.split import chunks_of, counts_of, forwards, ranks_of_depths, schedule_name
from megapipe.plan.state import GIB
from megapipe.plan.table import changes, layout_of_plan, memory_table, own_lines, summary, table
