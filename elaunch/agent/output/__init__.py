"""What the workers of a node write, and what becomes of it: log files, lines on the console, error files, events."""
