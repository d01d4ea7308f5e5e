"""`python -m gcore.engines.sglang_diffusion`: SGLang's diffusion server, under its supervisor or started by hand."""

from gcore.engines.launch import SglangDiffusionLaunch, run_engine

if __name__ == "__main__":
    run_engine("gcore.engines.sglang_diffusion", "gcore.engines.sglang_diffusion.server", SglangDiffusionLaunch)
