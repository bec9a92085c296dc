"""Looking for words in what is shown of a run: its id, workflow, reference, tags, and what it last failed with; and of
a task: its name, and its payload as JSON.

Every store finds the same: a word is a part of one of these texts, and of the letters only A to Z have no case. What
holds a NUL is found nowhere.
"""

from string import ascii_lowercase, ascii_uppercase

import msgspec

from holdfast.core.index_rows import Task
from holdfast.store.types import RunHead

_LOWERED = str.maketrans(ascii_uppercase, ascii_lowercase)


def lowered(text: str) -> str:
    """Return a text with small letters for A to Z; all others stay."""
    return text.translate(_LOWERED)


def words_of(text: str | None) -> list[str]:
    """Return the words that are looked for: all of them have to be found."""
    return lowered(text or "").split()


def is_found(head: RunHead, words: list[str]) -> bool:
    """Say whether every word is somewhere in what is shown of a run."""
    if not words:
        return True
    if any("\0" in word for word in words):
        return False
    error = head.snapshot.last_error if head.snapshot else None
    texts = [head.run_id, head.plan_id, head.reference_key or "", *head.tags]
    texts += [error.code, error.message] if error else []
    return all(any(word in lowered(text) for text in texts) for word in words)


def in_json(word: str) -> str:
    """Return a word as it stands within a text of JSON."""
    return msgspec.json.encode(word).decode()[1:-1]


def is_task_found(task: Task, words: list[str]) -> bool:
    """Return whether every word is in the name of a task or in its payload."""
    if not words:
        return True
    if any("\0" in word for word in words):
        return False
    name, payload = lowered(task.name), lowered(bytes(task.payload).decode())
    return all(word in name or in_json(word) in payload for word in words)
