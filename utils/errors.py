"""The one kind of error that the user can fix."""


class UserError(Exception):
    """The settings, the data or the machine are at fault, not the program.

    Its text is one line that says what is wrong and what to do. The entry scripts print that
    line, without a traceback, and exit with code 2; every other exception is a bug and keeps
    its traceback.
    """
