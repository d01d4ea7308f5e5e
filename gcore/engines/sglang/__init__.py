"""SGLang behind an adapter: its command line, and a worker that starts the server and reports its state."""
