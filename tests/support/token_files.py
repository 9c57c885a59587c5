"""Files of tokens that tests make, one document at a time."""

import numpy as np
from numpy.typing import ArrayLike

from megapipe.data.indexed import IndexedWriter


def add_document(writer: IndexedWriter, tokens: ArrayLike) -> None:
    """Add one document of one sequence; an empty one is an entry of the document array and no sequence."""
    row = np.asarray(tokens)
    writer.add_documents(row, np.array([row.size]))
