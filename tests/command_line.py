"""A verb as it is called, in this process."""

from typer.testing import CliRunner


def invoked(verbs, *words, code=0):
    """What a verb prints and how it ends, which is with `code`; what it raises is raised."""
    result = CliRunner().invoke(verbs, [*map(str, words)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result
