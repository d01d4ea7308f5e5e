"""The read-only web page of every controller, on its metrics port: jobs, learning curves, slots, events.

`app` is the WSGI application, `content` builds the JSON, `page.html` is the page: one file, without a build step and external resources.
"""
