"""Judges: generative reward models that answer with a verdict.

Read `judge` first. `template` writes questions, `parsers` reads answers, `external` asks a chat API, `rate_limit` bounds rate and cost.
"""
