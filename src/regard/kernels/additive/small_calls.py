"""The condition for additive calls on CUDA to be small enough to store their scores. It imports no Triton."""

from collections.abc import Sequence

_MOST_PAIRS = 2**24  # largest number of pairs whose scores are stored, 64 MiB
_MOST_FEATURES = 2**30  # pair-features up to which a tanh for each costs less than the preparation of the series
_MOST_QUERIES = 2**16  # limit of the second axis of a grid


def stores_scores(query: Sequence[int], key: Sequence[int], activation: str, form: str) -> bool:
    """Return whether a call with query (b, h, q, f) and key (b, g, k, f) stores its scores.

    If chosen by name (`form`), scores of tanh are stored at every size that memory allows.
    """
    if activation != "tanh" or form not in ("auto", "stored"):
        return False
    pairs = query[0] * query[1] * query[2] * key[2]
    small = 0 < pairs <= _MOST_PAIRS and pairs * query[3] <= _MOST_FEATURES and query[2] <= _MOST_QUERIES
    return small or form == "stored"
