"""The torch engine: a server of any Hugging Face causal language model, on SGLang's routes.

One process, one model, one thread for the model, one event loop for HTTP. From the bottom up:

- `columns`: where in the cache things stand (pure);
- `plan`: what waits, what joins, which version is served (pure);
- `rows`: what is known of each running sequence, as arrays (numpy);
- `cache`, `attention`, `sampling`, `model`: the leaf modules that import torch;
- `decoder`: one decode step; `runner`: the thread; `text`: the tokenizer;
- `bodies`, `refusals`, `params`, `protocol`, `administration`: what requests say, and how they are refused;
- `desk`, `gate`, `answers`, `settled`: from requests to tasks and back;
- `server`, `weight_routes`, `openai_routes`, `auth`: routes; `launch`, `serve`: the process.

This package's `__init__` imports nothing, so that a client never imports torch by accident.
"""
