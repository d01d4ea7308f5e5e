"""The operating system and the event loop: clocks, files, processes, memory, control groups, slots, fault injection.

Independent of jobs. `guard` is a separate program, run by its path, that prevents child processes from outliving their owner.
"""
