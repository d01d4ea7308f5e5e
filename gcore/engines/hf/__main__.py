"""`python -m gcore.engines.hf`: the Hugging Face engine, under its supervisor or started by hand."""

from gcore.engines.launch import run_engine

if __name__ == "__main__":
    run_engine("gcore.engines.hf", "gcore.engines.hf.engine")
