"""The Hugging Face engine: `generate` of transformers behind the torch engine's front end.

Slow; serves any model that `generate` does. Read `engine` first.
"""
