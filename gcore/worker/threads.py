"""How many threads a worker's libraries may run, told through the environment before it starts.

A worker has as many threads for arithmetic as its slot has cores, whichever library asks, and none of them spins while
it waits: on a small machine the neighbour needs the core (engine and rank take turns on it). Libraries read these
variables when they are loaded, so they cannot be set from inside. torch's own pools are set in the worker (its launch
document says `threads`).
"""

from __future__ import annotations

SIZED = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "RAYON_NUM_THREADS",
)
"""One pool each; without them a library takes every core that it sees."""


def thread_environment(threads: int) -> dict[str, str]:
    """The variables for a worker of `threads` threads."""
    return {name: str(threads) for name in SIZED} | {
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_DYNAMIC": "FALSE",
        "KMP_BLOCKTIME": "0",  # Intel's runtime spins this long (ms) whatever OMP_WAIT_POLICY says
        "TOKENIZERS_PARALLELISM": "false",
    }
