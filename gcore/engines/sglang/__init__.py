"""SGLang as a worker: `command` builds its command line, `adapter` starts the server and reports its state."""
