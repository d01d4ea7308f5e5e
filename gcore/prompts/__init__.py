"""The prompt stream: what is asked, in which order, and how far it was consumed.

`entries` and `index` check a JSONL file and find its entries, `dataset` reads them, `shards` orders them, `render` makes
text and tokens of them, `stream` joins these four, and `cursor` keeps what is terminal.
"""
