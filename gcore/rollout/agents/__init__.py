"""Agent programs that call the OpenAI API and are trained unchanged; each response has its own address.

Read `session` first: it generates one response. `server` is the endpoint and the process pool, `chat_protocol` the
request and response formats, `__main__` the agent's process.
"""
