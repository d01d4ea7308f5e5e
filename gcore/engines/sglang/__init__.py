"""SGLang behind an adapter: its command line, and a proxy that adds what the engine contract needs."""
