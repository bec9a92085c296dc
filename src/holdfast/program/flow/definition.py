"""A registered flow: its validated tree, with a path for every step.

A step's path is its id in every run: the names of the groups around it and its own, joined by `/`. A scene without a
name adds nothing. Two steps with the same path are refused, so the author has to name the second one. Inserting a step
therefore changes no other path, and runs that were started before still find their position.
"""

from collections.abc import Iterator, Mapping
from functools import cached_property
from hashlib import sha256
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import msgspec
from msgspec import Raw

from holdfast.core import codec
from holdfast.core.graph import Graph, GraphNode, NodeKind
from holdfast.errors import InvalidInput, NotDurable
from holdfast.limits import NAME_BYTES
from holdfast.program.definitions import (
    ActivityDefinition,
    ActivityOptions,
    OnError,
    WorkflowDefinition,
    encode_options,
    milliseconds,
)
from holdfast.program.fingerprint import CHARS, fingerprint
from holdfast.program.flow.steps import Act, Child, Chorus, Cue, Scene, Signal, Sleep, Step, Task
from holdfast.program.tasks import known_form
from holdfast.program.values import PLAIN, Signature, Values

MOST_DEPTH = 50
"""The maximum nesting depth of groups."""

PATH_BYTES = NAME_BYTES - 55
"""The longest path. The names of markers, compensations, children and attempts extend it, within `NAME_BYTES`."""

COMPENSATE = "compensate"
"""The suffix added to the path of a step for the step that undoes it."""


class Call:
    """How a step passes the state to an activity or a child."""

    __slots__ = ("_after", "_before", "input", "signature")

    def __init__(self, what: str, input: Any, signature: Signature, state: Any) -> None:
        self.input = input
        self.signature = signature
        self._before, self._after = b"{}", b""
        if input is not None:
            if not signature.names:
                raise InvalidInput(
                    f"{what}: {signature.name} takes no argument, so `input` has no effect", field="input"
                )
            return
        if not signature.names:
            return
        required = [name for name in signature.names if name in signature.required]
        if len(required) > 1 or (not required and len(signature.names) > 1):
            problem = f"{what}: {signature.name} takes {', '.join(signature.names)}; it needs `input`"
            raise InvalidInput(problem, field="input")
        [name] = required or signature.names
        if not _takes(signature.hints.get(name, Any), state):
            raise InvalidInput(
                f"{what}: {signature.name} takes {codec.type_name(signature.hints[name])}, and the state is "
                f"{codec.type_name(state)}; it needs `input`",
                field="input",
            )
        self._before, self._after = b"{" + bytes(codec.encode(name)) + b":", b"}"

    def with_state(self, state: Raw) -> Raw:
        """Return the arguments of a call that takes the state itself, or no argument."""
        return Raw(self._before + bytes(state) + self._after) if self._after else Raw(self._before)

    def with_value(self, given: Any) -> Raw:
        """Return the arguments of a call that takes what `input` has returned."""
        names = self.signature.names
        if len(names) == 1:
            return self.signature.pack((given,), {})
        if not isinstance(given, dict):
            problem = f"{self.signature.name} takes {', '.join(names)}: `input` returns a dict of them, not {given!r}"
            raise InvalidInput(problem, field="input")
        return self.signature.pack((), given)


class Node:
    """A step of a flow with its path."""

    __slots__ = (
        "activity",
        "call",
        "child",
        "compensation",
        "form",
        "key",
        "number",
        "options",
        "parent",
        "path",
        "step",
        "steps",
        "ways",
    )

    def __init__(self, step: Step[Any], path: str, parent: "Node | None") -> None:
        self.step = step
        self.path = path
        self.parent = parent
        self.number = 0
        """Its position in the tree; a group comes before its contents."""
        self.steps: tuple[Node, ...] = ()
        """The steps of a scene, or the branches of a chorus."""
        self.ways: Mapping[str, tuple[Node, ...]] = MappingProxyType({})
        """The steps of a cue, by choice."""
        self.activity: ActivityDefinition | None = None
        self.child: WorkflowDefinition | None = None
        self.call: Call | None = None
        self.options = ActivityOptions()
        self.key: str | None = None
        self.compensation: Node | None = None
        self.form: tuple[Raw, msgspec.json.Decoder[Any]] | None = None

    @property
    def encoded_options(self) -> Raw:
        """The options of an activity as they are stored."""
        return encode_options(self.options)

    def is_in(self, group: "Node") -> bool:
        """Return whether it is this group or is inside it."""
        node: Node | None = self
        while node is not None and node is not group:
            node = node.parent
        return node is not None


class FlowDefinition(WorkflowDefinition):
    """A registered flow."""

    def __init__(
        self,
        name: str,
        state: Any,
        root: Step[Any],
        version: str,
        *,
        doc: str = "",
        allows_other_signals: bool = False,
        values: Values = PLAIN,
        failures: Any = (),
        on_error: OnError = "pause",
        requires_approval: bool = False,
        is_entity: bool = False,
    ) -> None:
        if not isinstance(root, Step):
            raise InvalidInput(f"flow {name!r}: its root is a step, such as hf.Scene(…), not {root!r}", field="root")
        self.state_type = state
        self.root = Node(root if isinstance(root, Scene) and not root.step else Scene(root), "", None)
        self.nodes: dict[str, Node] = {}
        """The steps and groups by path, except the root."""
        signals: dict[str, Any] = {}
        _Tree(name, state, self.nodes, signals, values).fill(self.root)
        super().__init__(
            _function(name, state, doc),
            name,
            version,
            signals,
            allows_other_signals=allows_other_signals,
            values=values,
            failures=failures,
            on_error=on_error,
            requires_approval=requires_approval,
            is_entity=is_entity,
        )
        _require_fields(name, state, values)
        for node in self.nodes.values():
            if isinstance(node.step, Task):
                node.form = known_form(self, node.step.name, node.step.form)
        self.state_decoder = values.decoder(state, f"the state of flow {name!r}")
        self.queries["state"] = Signature(_state_query(state), "query 'state'", values=values)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the tree and of the author's functions in it."""
        digest = sha256()
        digest.update(codec.encode(self.values.schema(self.state_type)))
        for part in _outline(self.root):
            digest.update(part.encode(errors="replace") + b"\0")
        return digest.hexdigest()[:CHARS]

    def graph(self) -> Graph:
        """Return the tree as it is drawn."""
        return Graph(kind="flow", nodes=tuple(_drawn(self.root.steps, None, {})))

    def mermaid(self) -> str:
        """Return the tree as a Mermaid flowchart."""
        return self.graph().mermaid()


class _Tree:
    """Creates the node of every step, and checks what concerns the whole tree."""

    def __init__(self, name: str, state: Any, nodes: dict[str, Node], signals: dict[str, Any], values: Values) -> None:
        self._flow = f"flow {name!r}"
        self._state = state
        self._nodes = nodes
        self._signals = signals
        self._values = values

    def fill(self, node: Node, depth: int = 0) -> None:
        """Create the nodes of a group's contents."""
        if depth > MOST_DEPTH:
            raise InvalidInput(f"{self._flow}: groups are nested more than {MOST_DEPTH} deep")
        step = node.step
        if isinstance(step, Scene):
            node.steps = self._made(step.steps, node, depth)
        elif isinstance(step, Chorus):
            node.steps = self._made(step.branches, node, depth)
        elif isinstance(step, Cue):
            node.ways = {way: self._made((one,), node, depth) for way, one in step.ways.items()}

    def _made(self, steps: tuple[Step[Any], ...], parent: Node, depth: int) -> tuple[Node, ...]:
        made: list[Node] = []
        for step in steps:
            if isinstance(step, Scene) and not step.step:  # without a name: its steps are its parent's
                if depth > MOST_DEPTH:
                    raise InvalidInput(f"{self._flow}: groups are nested more than {MOST_DEPTH} deep")
                made += self._made(step.steps, parent, depth + 1)
            else:
                made.append(self._node(step, parent, depth))
        return tuple(made)

    def _node(self, step: Step[Any], parent: Node, depth: int) -> Node:
        path = f"{parent.path}/{step.step}" if parent.path else step.step
        what = f"{self._flow}, step {path!r}"
        if path in self._nodes:
            raise InvalidInput(f"{self._flow}: two steps have the path {path!r}; name one with step='…'", field="step")
        if len(path.encode()) > PATH_BYTES:
            raise InvalidInput(f"{what}: a path has at most {PATH_BYTES} UTF-8 bytes", field="step")
        node = self._nodes[path] = Node(step, path, parent)
        node.number = len(self._nodes)
        if isinstance(step, Act):
            self._call_activity(node, step, what)
        elif isinstance(step, Child):
            definition = step.workflow.definition
            node.child = definition
            self._call(node, step, definition.signature, what)
        elif isinstance(step, Signal):
            self._declare(step, what)
        elif not isinstance(step, Scene | Chorus | Cue | Task | Sleep):
            raise InvalidInput(f"{what}: {type(step).__qualname__} is not a step", field="root")
        self.fill(node, depth + 1)
        return node

    def _call_activity(self, node: Node, step: Act[Any], what: str) -> None:
        node.activity = step.activity.definition
        node.options, node.key = step.activity.call_options, step.activity.call.idempotency_key
        self._call(node, step, node.activity.signature, what)

    def _call(self, node: Node, step: Act[Any] | Child[Any], signature: Signature, what: str) -> None:
        node.call = Call(what, step.input, signature, self._state)
        if step.apply is None and not _returns(signature.result_type, self._state):
            raise InvalidInput(
                f"{what}: {signature.name} returns {codec.type_name(signature.result_type)}, and not "
                f"{codec.type_name(self._state)} or None; it needs `apply`",
                field="apply",
            )
        if step.compensate is not None:
            undo = node.compensation = Node(step.compensate, f"{node.path}:{COMPENSATE}", node)
            called = step.compensate.activity
            undo.activity = called.definition
            undo.options, undo.key = called.call_options, called.call.idempotency_key
            undo.call = Call(f"{what}, its compensation", step.compensate.input, undo.activity.signature, self._state)

    def _declare(self, step: Signal[Any], what: str) -> None:
        known = self._signals.setdefault(step.name, step.kind)
        if known != step.kind:
            raise InvalidInput(
                f"{what}: signal {step.name!r} is {codec.type_name(step.kind)} here and "
                f"{codec.type_name(known)} elsewhere in the flow",
                field="kind",
            )


def _function(name: str, state: Any, doc: str) -> Any:
    """Return a function whose parameters are those of the flow: its state."""

    async def flow(state: Any) -> Any:
        raise NotDurable(f"flow {name!r} runs on a node: start it with app.start, or as a child")

    flow.__name__ = flow.__qualname__ = name
    flow.__doc__ = doc
    flow.__annotations__ = {"state": state, "return": state}
    return flow


def _state_query(state: Any) -> Any:
    def query() -> Any:
        """Return the state."""

    query.__annotations__ = {"return": state}
    return query


def _require_fields(name: str, state: Any, values: Values) -> None:
    """Raise unless values of this type are stored as JSON objects, because branches are merged by field."""
    schema = values.schema(state)
    described = schema
    if (reference := schema.get("$ref", "")).startswith("#/$defs/"):
        described = schema["$defs"][reference.removeprefix("#/$defs/")]
    if described.get("type") != "object":
        raise InvalidInput(
            f"flow {name!r}: its state is a dataclass, a Struct or a model with fields, not {codec.type_name(state)}",
            field="state",
        )


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _takes(hint: Any, state: Any) -> bool:
    """Return whether a parameter of this type takes the state."""
    for member in _members(hint):
        is_base = isinstance(member, type) and isinstance(state, type) and issubclass(state, member)
        if member is Any or member == state or is_base:
            return True
    return False


def _returns(hint: Any, state: Any) -> bool:
    """Return whether this type is the state, or None for an unchanged one."""
    return hint is Any or all(member == state or member in (None, NoneType) for member in _members(hint))


# --- the outline and the drawing


def _outline(node: Node) -> Iterator[str]:
    """Yield, in order, text that changes whenever the flow's behaviour does."""
    yield f"{type(node.step).__name__} {node.path}"
    for name, value in sorted(vars(node.step).items()):
        definition = getattr(value, "definition", None)
        if isinstance(definition, ActivityDefinition | WorkflowDefinition):
            yield f"{name} {definition.name}"
        elif callable(value) and name not in ("kind", "form"):
            yield f"{name} {fingerprint(value)}"
        elif isinstance(value, Act):
            yield from _outline(Node(value, name, None))
        elif not isinstance(value, tuple | dict):
            yield f"{name} {value!r}"
    for way, steps in (node.ways or {"": node.steps}).items():
        yield f"way {way}"
        for step in steps:
            yield from _outline(step)


_KINDS: dict[type, NodeKind] = {
    Act: "activity",
    Child: "child",
    Signal: "signal",
    Task: "task",
    Sleep: "timer",
    Scene: "scene",
    Chorus: "chorus",
    Cue: "cue",
}


def _drawn(nodes: tuple[Node, ...], parent: str | None, known: dict[str, Any], branch: str = "") -> Iterator[GraphNode]:
    """Yield the nodes of a group in sequence, and their contents."""
    before: tuple[str, ...] = ()
    for node in nodes:
        step = node.step
        depends_on = () if parent is not None and isinstance(_group(node), Chorus) else before
        yield GraphNode(
            id=node.path,
            label=step.step,
            kind=_KINDS[type(step)],
            parent=parent,
            depends_on=depends_on,
            branch=branch,
            detail=_detail(node),
        )
        before = (node.path,)
        if node.ways:
            for way, steps in node.ways.items():
                yield from _drawn(steps, node.path, known, "else" if way == "otherwise" else way)
        else:
            yield from _drawn(node.steps, node.path, known)


def _group(node: Node) -> Step[Any] | None:
    return None if node.parent is None else node.parent.step


def _detail(node: Node) -> str:
    """Return the detail that is shown next to the name."""
    step, parts = node.step, []
    if node.activity is not None and node.activity.name != step.step:
        parts.append(node.activity.name)
    if isinstance(step, Child) and node.child is not None:
        parts.append(f"workflow {node.child.name}")
    if isinstance(step, Signal):
        parts += [f"signal {step.name}"] if step.name != step.step else []
        parts += [f"at most {_shown(step.timeout_ms)}"] if step.timeout_ms is not None else []
    if isinstance(step, Sleep) and not callable(step.duration):
        parts.append(_shown(milliseconds(step.duration) or 0))
    if isinstance(step, Chorus):
        parts.append(step.on_failure)
    if step.condition is not None:
        parts.append("if its condition holds")
    if node.compensation is not None and node.compensation.activity is not None:
        parts.append(f"undone by {node.compensation.activity.name}")
    return ", ".join(parts)


def _shown(duration_ms: int) -> str:
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1_000)):
        if duration_ms >= size and duration_ms % size == 0:
            return f"{duration_ms // size} {unit}"
    return f"{duration_ms} ms"
