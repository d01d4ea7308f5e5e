"""HTTP of engines: bodies, refusals, control and weight routes, the OpenAI API."""
