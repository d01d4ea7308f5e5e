"""`python -m gcore.engines.sglang`: an SGLang server behind its adapter, under its supervisor."""

from gcore.engines.sglang.adapter import run

if __name__ == "__main__":
    run()
