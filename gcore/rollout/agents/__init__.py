"""Agent programs that call the OpenAI API and are trained unchanged; each response has its own address.

`session` is one response, `server` the endpoint, `chat_protocol` messages in and out, `worker` the agent's process.
"""
