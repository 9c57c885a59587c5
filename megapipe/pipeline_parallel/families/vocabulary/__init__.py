"""Run the passes of an embedding and a head that all ranks share: E, S, T, EW and C.

The first four run on a rank's share of the vocabulary, and C where the loss is: vocabulary
parallelism for pipelines (Yeung et al. 2024).
"""

from __future__ import annotations

from megapipe.pipeline_parallel.families.family import Family
from megapipe.pipeline_parallel.families.vocabulary.ends import shape_of, stages_of
from megapipe.schedule import Kind

NAME = "vocabulary"
VOCABULARY = Family(
    NAME,
    {
        Kind.E: lambda stage, microbatch, _: stage.own[NAME].share.look_up(microbatch),
        Kind.S: lambda stage, microbatch, given: stage.own[NAME].share.give(microbatch, *given),
        Kind.C: lambda stage, microbatch, given: stage.own[NAME].combine(stage, microbatch, given),
        Kind.T: lambda stage, microbatch, given: stage.own[NAME].share.head_gradient(
            microbatch, *given
        ),
        Kind.EW: lambda stage, microbatch, given: stage.own[NAME].share.rows_gradient(
            microbatch, *given
        ),
    },
    stages=stages_of,
    shapes=shape_of,
)
