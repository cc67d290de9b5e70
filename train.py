#!/usr/bin/env python3
"""Trains a classifier of pictures or texts, from what lies in a folder or a table.

python train.py my_pictures --time 10m        a folder for each class
python train.py tickets.csv --time 10m        a table with a text and its class in each row
python train.py --resume                      go on with the newest run
python train.py --resume runs/my_run --predict new_pictures
"""

import sys

from utils.entry import end_process
from utils.start.command import as_entry, main

__all__ = ["as_entry"]  # for run_distributed.sh

if __name__ == "__main__":
    end_process(main(sys.argv[1:], __doc__))
