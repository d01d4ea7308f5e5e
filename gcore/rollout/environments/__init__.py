"""Multi-turn responses in an environment: tools, observations, rewards.

`api` is the plug-in interface, `episode` runs one response, `tools` parses tool calls, `pool` runs tools in their own
processes (`__main__`).
"""
