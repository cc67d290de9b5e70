#!/usr/bin/env python3
"""The .sh of this name, as other projects call it. transformer_tuning.py is a link to this."""

import os
import sys

if __name__ == "__main__":
    script = os.path.abspath(__file__).removesuffix("py") + "sh"
    os.execvpe("bash", ["bash", script, *sys.argv[1:]], os.environ | {"PYTHON": sys.executable})
