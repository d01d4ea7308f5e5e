"""Prompts: files, templates, tokens, order.

`stream` opens the sources of a spec and finds the prompt of a ref; `order` is the pure part: permutation, mixture, cursors. Read `stream` first.
"""
