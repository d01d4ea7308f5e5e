"""Foreign code (rewards, tools, agents) in child processes: pools, line protocol, confinement.

Read `process` first, then `pool`. `box` confines a program; `jail` and `probe` run inside and import nothing of gcore.
"""
