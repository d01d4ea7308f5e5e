"""The client of engines, and multi-turn responses.

Read `client` first. Engine servers are in `gcore.engines`.
"""
