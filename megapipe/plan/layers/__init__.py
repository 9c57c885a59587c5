"""The cost of one transformer layer, from its widths: time, activations and parameters.

A file here counts by formula what the files of the same part in `models` compute and keep. Tests
hold the formulas to the FLOPs that torch counts and to the tensors that autograd keeps.
"""

from megapipe.plan.layers.head import head_work
from megapipe.plan.layers.layer import layer_work, passing
from megapipe.plan.layers.load import NOT_GATHERED, Gathers, RankLoad, norm_size
from megapipe.plan.layers.work import Work
