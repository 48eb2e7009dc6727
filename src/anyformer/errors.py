"""The one shape of a message for a user's mistake: what, where, got, expected, remedy."""


class UserError(ValueError):
    """Something the user gave cannot work; the command line prints it and exits with 2.

    Args:
        what: one sentence that says what is wrong.
        where: the file, key or argument at fault.
        got: the offending value.
        expected: what would be legal.
        remedy: what to do next.
    """

    def __init__(
        self,
        what: str,
        *,
        where: object = None,
        got: object = None,
        expected: object = None,
        remedy: object = None,
    ) -> None:
        self.what, self.where, self.got, self.expected, self.remedy = what, where, got, expected, remedy
        named = (("where", where), ("got", got), ("expected", expected), ("remedy", remedy))
        super().__init__("\n".join([what, *(f"  {name}: {value}" for name, value in named if value is not None)]))
