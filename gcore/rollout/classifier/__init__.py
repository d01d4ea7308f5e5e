"""The torch engine's other half: a model with a sequence-classification head, on SGLang's route /classify.

The process, its thread, its event loop and the routes that control it are the torch engine's (`gcore.rollout.engine`); here
is what differs where a question is answered with one number:

- `batches`: which questions go through the model together (pure); `body`: what a request says;
- `model`: loading, and one pass; `start`: from a launch to a core; `core`: a cycle; `desk`: from requests to questions and back;
- `routes`: the routes.

This package's `__init__` imports nothing, so that a client never imports torch by accident.
"""
