"""What the user can fix."""

from .place import as_called


class UserError(Exception):
    """The settings, the data or the machine are at fault, not the program.

    Its text is one line that says what is wrong and what to do. The entry scripts print that
    line, without a traceback, and exit with code 2; every other exception is a bug and keeps
    its traceback.
    """

    def __init__(self, text: str = ""):
        super().__init__(as_called(text))


class Faults:
    """Gathers UserErrors, so that all are told at once: `with faults:` around each of several
    checks, and `faults.tell()` after them."""

    MOST = 8  # that are told

    def __init__(self):
        self.errors: list[UserError] = []

    def __enter__(self) -> None: ...

    def __exit__(self, kind, error, traceback) -> bool:
        if not isinstance(error, UserError):
            return False
        self.errors.append(error)
        return True

    def tell(self) -> None:
        """Raises UserError if there are any."""
        if len(self.errors) == 1:
            raise self.errors[0]
        if self.errors:
            told = [f"({n}) {error}" for n, error in enumerate(self.errors[: self.MOST], 1)]
            more = ["and so on"] * (len(self.errors) > self.MOST)
            raise UserError(f"{len(self.errors):,} faults: {'; '.join(told + more)}")


def one_line(error: object, most: int | None = None) -> str:
    """The text of an error in one line, of at most `most` characters; its class if it has none."""
    text, kind = " ".join(str(error).split())[:most], type(error).__name__
    return f"{kind}: {text}" if isinstance(error, KeyError) else text or kind


def network_cause(error: BaseException) -> str:
    """What lies behind an error of urllib, such as "Network is unreachable", in one line."""
    cause = getattr(error, "reason", error)
    return one_line(getattr(cause, "strerror", None) or cause)
