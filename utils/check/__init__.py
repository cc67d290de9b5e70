"""`--check`: whether the machine, or all of them together, can train as they should."""
