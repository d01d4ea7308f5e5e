"""Foreign code (rewards, tools, agents) in processes of its own: pools, the line protocol, and confinement.

Read `process` first, then `pool`. `box` confines a program; `jail` and `probe` run inside and import nothing of gcore.
"""
