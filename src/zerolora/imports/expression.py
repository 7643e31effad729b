"""What a file has in place of a value: code that is never run."""


class Expression(str):
    """An expression that only a shell or Python could compute, as written; or the name of a class or function."""
