"""The page that every controller serves beside its metrics, for those without Grafana: jobs, learning curves, slots, events.

    app        HTTP: which path is what, and what is answered when there is nothing to answer with
    shown      what is shown of the cluster and of a job, from the store, the runner and the run's folder
    curves     a run's numbers step by step, as the page draws them
    timeline   what slots did when, as the page draws it
    kept       what was read of a folder, until there is something new
    page.html  the page: one file, nothing from outside, no build step

Read-only. Decides nothing, and no step waits for it.
"""
