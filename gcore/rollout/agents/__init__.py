"""Foreign agent code that speaks the OpenAI API and is trained as it is: each response has an address of its own.

`session` is one response, `server` the endpoint, `chat_protocol` messages in and out, `worker` the agent's process.
"""
