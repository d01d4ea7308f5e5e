"""SGLang beside gcore: its server in an environment of its own, behind a small worker that speaks gcore's control line.

SGLang pins a torch and a CUDA stack that are not gcore's, so nothing in here imports it, or torch: the server is a child
process, and all that is said to it goes over HTTP.
"""
