"""New processes that do not run the user's script again."""

import multiprocessing
import sys
from types import ModuleType


class _Process(multiprocessing.context.SpawnProcess):
    def start(self) -> None:
        """Starts the process. It would import the main module anew: a script that trains without
        `if __name__ == "__main__":` would train in it, too. Nothing that it needs is there."""
        main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
        try:
            super().start()
        finally:
            sys.modules["__main__"] = main


class SpawnContext(multiprocessing.context.SpawnContext):
    Process = _Process  # type: ignore[assignment]
