"""SGLang's diffusion server as an engine, behind gcore's own routes.

`server` starts it and serves, `engine` passes requests on and serialises weight updates with them, `rollouts` has SGLang's
requests and checks its answers.
"""
