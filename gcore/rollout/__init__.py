"""Responses: the client of engines, and responses of several turns (`environments`, `agents`).

Read `client` first. Engine servers are in `gcore.engines`.
"""
