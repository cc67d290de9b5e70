"""What the user can fix."""


class UserError(Exception):
    """The settings, the data or the machine are at fault, not the program.

    Its text is one line that says what is wrong and what to do. The entry scripts print that
    line, without a traceback, and exit with code 2; every other exception is a bug and keeps
    its traceback.
    """


class UnknownFlag(UserError):
    """An entry does not have the flag.

    Args:
        flag: as it was typed.
        hint: how the text goes on.
    """

    def __init__(self, flag: str, hint: str = ""):
        super().__init__(f"unknown flag {flag}{hint or '; see --help'}")
        self.flag = flag
