"""What a node says of itself when it begins: what it works on, and where."""

from holdfast.engine.options import NodeOptions
from holdfast.settings import without_password as without_password
from holdfast.store.open import is_new
from holdfast.store.port import Store


def work_of(plan_ids: list[str], options: NodeOptions) -> str:
    """Name the workflows and the queues that a node works on."""
    runs = [", ".join(plan_ids) or "no workflow at all"] if options.takes_runs else []
    queues = [f"queue {', '.join(options.queues)}"] if options.queues else []
    return " and ".join(runs + queues) or "nothing: it takes no runs and has no queues"


def place_of(store: str | Store) -> str:
    """Name a store as a log may show it: without passwords, and with a word if it is about to be made."""
    if not isinstance(store, str):
        return type(store).__name__
    return f"{without_password(store)} (new)" if is_new(store) else without_password(store)
