"""How the model is spread over processes: a file for each strategy of settings/distributed.py."""
