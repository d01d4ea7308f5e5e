"""Multi-turn responses in an environment: tools, observations, rewards.

Read `api` first: the plug-in interface. `episode` runs one response, `tools` parses tool calls, and `pool` runs tools
in processes of their own (`__main__`).
"""
