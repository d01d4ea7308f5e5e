"""The prompt stream: what is asked, in which order, and how far it was consumed.

`opening` makes a job's prompts of its spec. `formats` finds what lies at a source's path, `copies` and `tables` make JSON
lines of what is none, `entries` and `index` check them, `dataset` reads them. `template`, `tools`, `tokenizer` and `render`
make text and tokens of an entry, `source` joins all this for one source. `mixture` makes an epoch of several sources,
`shards` cuts and orders it (or a `curriculum` does), `stream` finds the prompt of a ref, `lengths` counts tokens before a
job, and `cursor` keeps what is terminal.
"""
