"""Layers whose weights are split over tensor-parallel ranks."""

from megapipe.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megapipe.tensor_parallel.embedding import VocabParallelEmbedding
from megapipe.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
