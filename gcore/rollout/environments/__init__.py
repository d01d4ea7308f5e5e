"""Multi-turn responses in an environment: tools, observations, rewards.

`api` is what a plug-in implements, `episode` drives one response, `tools` calls tools, `pool` and `worker` run them in processes of their own.
"""
