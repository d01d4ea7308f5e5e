"""Judges: generative reward models that answer with a verdict.

Read `judge` first. `template` renders questions, `parsers` parses answers, `external` calls a chat API, `rate_limit`
limits rate and cost.
"""
