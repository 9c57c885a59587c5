"""The families of passes that a plan knows. A new one is a file here and a place in the list."""

from megapipe.plan.families.offload import OFFLOAD
from megapipe.plan.families.replicas import REPLICAS
from megapipe.plan.families.sharding import SHARDING
from megapipe.plan.families.vocabulary import VOCABULARY

FAMILIES = OFFLOAD, SHARDING, VOCABULARY, REPLICAS
