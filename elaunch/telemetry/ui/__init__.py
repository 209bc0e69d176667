"""The page of `elaunch ui` and `--ui-port`: the history of a job, what is shown of it, and who serves it."""
