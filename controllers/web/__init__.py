"""The page that every controller serves beside its metrics: jobs, learning curves, slots, events. Read-only.

`app` is the HTTP side, `content` what is shown, `page.html` the page: one file, without a build step and without anything from outside.
"""
