"""Prompts: files, templates, tokens, order.

Read `stream` first: it opens the sources of a spec and finds the prompt of a ref (epoch, shard, position). `order` is
the pure part: permutations, mixtures of sources, and cursors.
"""
