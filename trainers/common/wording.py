"""Numbers with their nouns."""


def counted(number: int, noun: str) -> str:
    """The number and its noun, in the plural where English asks for it.

    >>> counted(1, "document"), counted(2000, "document")
    ('1 document', '2,000 documents')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
