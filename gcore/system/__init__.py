"""The operating system and the event loop: clocks, files, processes, memory, control groups, slots, fault injection.

Knows nothing of jobs. `guard` is a program of its own, run by its path, that keeps child processes from outliving their owner.
"""
