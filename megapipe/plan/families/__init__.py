"""The features that add passes, such as offload. A new one is a file here and in the list."""

from megapipe.plan.families.offload import OFFLOAD
from megapipe.plan.families.replicas import REPLICAS
from megapipe.plan.families.sharding import SHARDING
from megapipe.plan.families.vocabulary import VOCABULARY

FAMILIES = OFFLOAD, SHARDING, VOCABULARY, REPLICAS
