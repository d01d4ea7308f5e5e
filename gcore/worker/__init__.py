"""Workers: the processes that compute, each under a small supervisor of its own."""
