"""train.py: from a place with data to an entry's command line."""
