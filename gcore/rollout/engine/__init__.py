"""The torch engine: a server of any Hugging Face causal language model, on SGLang's routes.

One process, one model, one thread for the model, one event loop for HTTP. From the bottom up:

- `columns`: where in the cache things stand; `schedule`: who gets a row, and how much of the prompts is read (pure);
- `tasks`: what was asked and what has come of it; `rows`: the running sequences as arrays (numpy);
- `model`, `quick`, `straight`, `cache`, `attention`, `sampling`, `prefill`: the leaf modules over torch;
- `lane`: how rows are kept and stepped: `shared` (one batch, one cache), `tiled` (deterministic), `plain` (any model that
  the others cannot bear); `prove`: which lane a model bears, found out by trial;
- `decoder`: one step over a lane; `reading`: what a cycle reads; `core`: a cycle; `runner`: the thread; `text`: the tokenizer;
- `weights`, `memory`: change and release; `start`: from a launch to a core;
- `bodies`, `refusals`, `params`, `protocol`, `administration`: what requests say, and how they are refused;
- `post`: between the event loop and the thread; `desk`, `gate`, `answers`, `settled`: from requests to tasks and back;
- `server`, `control_routes`, `weight_routes`, `openai`, `openai_routes`, `auth`: routes; `launch`, `serve`: the process.

What controls an engine (`control_routes`, `weight_routes`, `post`, `runner`) knows of a model only what `served` says, and serves a
classifier too (`gcore.rollout.classifier`).

This package's `__init__` imports nothing, so that a client never imports torch by accident.
"""
