"""The torch engine: a server for any Hugging Face causal language model, and for classifiers.

Read `engine` first (schedule, prefill, decode, finish), then `scheduler` and `model_runner`. `async_engine` owns the
thread, `frontend` the HTTP side. The package imports nothing, so that a client never imports torch.
"""
