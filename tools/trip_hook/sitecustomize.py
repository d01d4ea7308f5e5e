"""Python imports this at the start of a process that has this folder on its path."""

import trip_hook

trip_hook.start()
