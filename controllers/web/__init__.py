"""The web page that every controller serves on its metrics port: jobs, learning curves, slots, events. Read-only.

`app` is the WSGI application, `content` builds the JSON, `page.html` is the page: one file, without a build step and external resources.
"""
