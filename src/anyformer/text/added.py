"""Added tokens that stand beside tokenizer.json, brought into the tokenizer by the rules of Hugging Face.

A token that tokenizer_config.json declares, or names for a role, becomes an added token with the flags given there. One
that the vocabulary knows keeps its id; any other is appended. A token that is named for a role is a control token.
"""

from pathlib import Path

from tokenizers import AddedToken
from tokenizers import Tokenizer as Library

from anyformer.errors import UserError
from anyformer.text.settings import Settings


def complete(library: Library, settings: Settings, where: Path) -> frozenset[str]:
    """Adds to `library` the tokens that `settings` declare or name; returns those to which no file gives an id.

    Raises:
        UserError: a declared token would get another id than the one it is declared with.
    """
    tokens = settings.tokens
    held = library.get_added_tokens_decoder()
    declared = tokens.declared if tokens.declared is not None else {**tokens.older, **held}
    # What one of the files calls a control token is one, so that no text can spell it.
    control = {*settings.named.values(), *(token.content for token in held.values() if token.special)}
    known = {token.content for token in (*held.values(), *declared.values())}
    unnumbered: dict[str, AddedToken] = {}
    for token in (*tokens.roles, *tokens.extra):
        if token.content and token.content not in known:
            unnumbered.setdefault(token.content, token)
    foreign = {token.content: index for index, token in declared.items() if _id(library, token) is None}
    invented = frozenset(content for content, token in unnumbered.items() if _id(library, token) is None)
    wanted = [declared[index] for index in sorted(declared)]
    library.add_tokens([_control(token) if token.content in control else token for token in wanted])
    library.add_tokens([_control(token) for token in unnumbered.values()])
    for content, index in foreign.items():
        if library.token_to_id(content) != index:
            raise UserError(
                "the ids of the added tokens do not follow the vocabulary",
                where=where,
                got=f"{content!r} with id {index}",
                expected=f"id {library.token_to_id(content)}",
                remedy="give the tokens in between a name too",
            )
    return invented


def _id(library: Library, token: AddedToken) -> int | None:
    index: int | None = library.token_to_id(token.content)
    return index


def _control(token: AddedToken) -> AddedToken:
    return AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=True,
    )
