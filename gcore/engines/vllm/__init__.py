"""vLLM as an engine: `core` drives vLLM's engine core step by step, `model` builds it from a launch document.

The process runs in vLLM's own Python (`environment` finds it) and shares threads, routes and HTTP with the torch engine.
Read `core` first. `__main__` is the program.
"""
