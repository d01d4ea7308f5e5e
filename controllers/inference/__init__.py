"""Inference engines as a controller uses them: pool, routing, requests, retries, judges.

Read `pool` first (which engines there are and which weights they have), then `requests` (sends requests to them).
`rules` and `continuation` are pure. The engine servers themselves are in `gcore.engines`. A judge is a model with its
own engines, or an external service (`judge_engines`, `judges`).
"""
