"""The torch engine: a server for any Hugging Face causal language model, and for classifiers.

Read `engine` first (schedule, prefill, decode, finish), then `scheduler` and `model_runner`. `async_engine` runs the
model in its own thread, `frontend` is the HTTP side. This file imports nothing, so that a client never imports torch.
"""
