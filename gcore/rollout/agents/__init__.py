"""Agent programs that call the OpenAI API and are trained unchanged; each response has its own address.

`session` is one response, `server` the endpoint and the process pool, `chat_protocol` the request and response formats,
`__main__` the agent's process.
"""
