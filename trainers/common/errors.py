"""The error that a person can mend: one line that says what, where and what to do."""


class InputError(ValueError):
    """Bad input from outside (a file, an option, a folder). Commands print it as one line and exit with 2."""
