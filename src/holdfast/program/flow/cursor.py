"""The position of a run in its tree: the groups that are running, and what may have to be undone.

A rotation carries it over as a cursor, which names steps by their paths. If the tree has changed, the cursor is
compared with the new tree, and `NondeterminismError` names the first step that does not fit.
"""

from collections.abc import Container, Iterable, Mapping

from msgspec import Raw, Struct

from holdfast.core import codec
from holdfast.core.events import ErrorInfo
from holdfast.errors import InvalidInput, NondeterminismError
from holdfast.program.flow.definition import FlowDefinition, Node
from holdfast.program.flow.steps import Chorus, Cue


class Frame:
    """A group that is running."""

    __slots__ = ("ended", "failed", "node", "parent", "position", "state", "steps", "way")

    def __init__(self, node: Node, parent: "Frame | None", state: Raw) -> None:
        self.node = node
        self.parent = parent
        self.state = state
        """The current state; for a chorus, the state at its entry."""
        self.steps = node.steps
        self.way = ""
        """The branch that the cue has chosen."""
        self.position = 0
        self.ended: dict[str, Raw] = {}
        """The states of the chorus branches that have succeeded, by name."""
        self.failed: dict[str, ErrorInfo] = {}
        """The errors of the branches that have failed, by name."""


class Undoing:
    """Undoing completed steps one after the other, for the whole flow or for one branch of a chorus."""

    __slots__ = ("branch", "error", "failures", "frame", "left", "open")

    def __init__(self, frame: Frame | None, branch: Node | None, error: ErrorInfo | None) -> None:
        self.frame = frame
        self.branch = branch
        """The branch of the frame's chorus, or None for the whole flow."""
        self.error = error
        """The error that caused it, or None if the run is cancelled."""
        self.left: list[tuple[Node, Raw]] = []
        self.open: set[str] = set()
        self.failures: list[ErrorInfo] = []


class Position:
    """The position of a run: its frames, its open steps, and what was completed and can still be undone."""

    __slots__ = ("frames", "is_cancelling", "open", "root", "strays", "undo", "undoing")

    def __init__(self, root: Frame) -> None:
        self.root = root
        self.frames: dict[str, Frame] = {}
        """The running groups except the root, by path, outer ones first."""
        self.open: dict[str, tuple[Node, Frame | None]] = {}
        """The open steps with the frames that contain them. A step without a frame undoes another step."""
        self.undo: list[tuple[Node, Raw]] = []
        """The completed steps that have a compensation, in order of completion, with the states after them."""
        self.undoing: list[Undoing] = []
        self.strays: list[tuple[Node, ErrorInfo]] = []
        """What could not be undone in branches of groups that were cancelled."""
        self.is_cancelling = False

    @property
    def size(self) -> int:
        """Its approximate size in bytes in a history."""
        frames = sum(len(frame.state) + sum(map(len, frame.ended.values())) for frame in self.frames.values())
        undo = sum(len(state) for _, state in self.undo)
        return len(self.root.state) + frames + undo + sum(len(state) for each in self.undoing for _, state in each.left)

    @property
    def state(self) -> Raw:
        """The current state; in a chorus, the state at its entry."""
        frame = self.root
        while frame.position < len(frame.steps) and not isinstance(frame.node.step, Chorus):
            inner = self.frames.get(frame.steps[frame.position].path)
            if inner is None:
                break
            frame = inner
        return frame.state


class _Frame(Struct, frozen=True, omit_defaults=True):
    path: str
    state: Raw
    at: str = ""
    way: str = ""
    ended: dict[str, Raw] = {}
    failed: dict[str, ErrorInfo] = {}


class _Undoing(Struct, frozen=True, omit_defaults=True):
    chorus: str = ""
    branch: str = ""
    error: ErrorInfo | None = None
    left: list[tuple[str, Raw]] = []
    open: list[str] = []
    failures: list[ErrorInfo] = []


class _Cursor(Struct, frozen=True, omit_defaults=True):
    frames: list[_Frame]
    """The root first, each frame after its parent."""
    open: list[str] = []
    undo: list[tuple[str, Raw]] = []
    undoing: list[_Undoing] = []
    strays: list[tuple[str, ErrorInfo]] = []
    is_cancelling: bool = False


def saved(position: Position) -> Raw:
    """Return a position as the input of the next part of a run."""
    cursor = _Cursor(
        frames=[_saved_frame(frame) for frame in (position.root, *position.frames.values())],
        open=list(position.open),
        undo=[(node.path, state) for node, state in position.undo],
        undoing=[
            _Undoing(
                chorus="" if each.frame is None else each.frame.node.path,
                branch="" if each.branch is None else each.branch.path,
                error=each.error,
                left=[(node.path, state) for node, state in each.left],
                open=sorted(each.open),
                failures=each.failures,
            )
            for each in position.undoing
        ],
        strays=[(node.path, error) for node, error in position.strays],
        is_cancelling=position.is_cancelling,
    )
    return codec.encode(cursor)


def _saved_frame(frame: Frame) -> _Frame:
    at = frame.steps[frame.position].path if frame.position < len(frame.steps) else ""
    is_chorus = isinstance(frame.node.step, Chorus)
    return _Frame(frame.node.path, frame.state, "" if is_chorus else at, frame.way, frame.ended, frame.failed)


def restored(raw: Raw, flow: FlowDefinition, carried: Container[str]) -> Position:
    """Return the position that a rotation carried over; raise if the flow no longer has it, or a step is not open."""
    try:
        cursor = codec.decode(raw, _Cursor)
    except InvalidInput as problem:
        raise NondeterminismError(f"flow {flow.name!r}: its rotation carries no position: {problem}") from problem
    return _Restoring(flow, cursor).position(carried)


class _Restoring:
    def __init__(self, flow: FlowDefinition, cursor: _Cursor) -> None:
        self._flow = flow
        self._cursor = cursor

    def position(self, carried: Container[str]) -> Position:
        cursor = self._cursor
        first, *others = cursor.frames
        position = Position(self._frame(first, None))
        for each in others:
            node = self._node(each.path)
            parent = position.frames.get(self._group_of(node).path, position.root)
            position.frames[each.path] = self._frame(each, parent)
        for step_id in cursor.open:
            node = self._node(step_id)
            if step_id not in carried:
                raise self._misfit(f"the rotation does not carry the open step {step_id!r}")
            is_undoing = step_id not in self._flow.nodes
            frame = None if is_undoing else position.frames.get(self._group_of(node).path, position.root)
            position.open[step_id] = node, frame
        position.undo = self._left(cursor.undo)
        position.undoing = [self._undoing(each, position.frames) for each in cursor.undoing]
        position.strays = [(self._node(path), error) for path, error in cursor.strays]
        position.is_cancelling = cursor.is_cancelling
        if not position.is_cancelling and not any(each.frame is None for each in position.undoing):
            self._check_branches(position)
        return position

    def _group_of(self, node: Node) -> Node:
        assert node.parent is not None
        return node.parent

    def _node(self, path: str) -> Node:
        step, _, undoes = path.partition(":")
        node = self._flow.nodes.get(step)
        found = node.compensation if node is not None and undoes else node
        if found is None:
            raise self._misfit(f"the run is at step {path!r}, which the flow has no more")
        return found

    def _frame(self, saved: _Frame, parent: Frame | None) -> Frame:
        node = self._flow.root if parent is None else self._node(saved.path)
        frame = Frame(node, parent, saved.state)
        frame.way, frame.ended, frame.failed = saved.way, dict(saved.ended), dict(saved.failed)
        if isinstance(node.step, Cue):
            if saved.way and saved.way not in node.ways:
                raise self._misfit(f"the run has chosen {saved.way!r} at step {saved.path!r}; the flow has no such way")
            frame.steps = node.ways[saved.way] if saved.way else ()
        if saved.at:
            paths = [step.path for step in frame.steps]
            if saved.at not in paths:
                raise self._misfit(f"the run is at step {saved.at!r}, which is not in {saved.path or 'the root'!r} now")
            frame.position = paths.index(saved.at)
        return frame

    def _left(self, entries: Iterable[tuple[str, Raw]]) -> list[tuple[Node, Raw]]:
        left = [(self._node(path), state) for path, state in entries]
        for node, _ in left:
            if node.compensation is None:
                raise self._misfit(f"step {node.path!r} was completed, and has no compensation any more")
        return left

    def _undoing(self, saved: _Undoing, frames: Mapping[str, Frame]) -> Undoing:
        branch = self._node(saved.branch) if saved.branch else None
        frame = frames.get(saved.chorus)
        if frame is None and branch is not None:  # its chorus was cancelled
            frame = Frame(self._group_of(branch), None, codec.encode(None))
        undoing = Undoing(frame, branch, saved.error)
        undoing.left, undoing.open, undoing.failures = self._left(saved.left), set(saved.open), list(saved.failures)
        return undoing

    def _check_branches(self, position: Position) -> None:
        """Raise if a running chorus has branches that the run has not started, or lacks some that it has started."""
        under_way = {*position.open, *position.frames, *(each.branch.path for each in position.undoing if each.branch)}
        for frame in position.frames.values():
            if not isinstance(frame.node.step, Chorus):
                continue
            names = {branch.step.step for branch in frame.steps}
            for name in {**frame.ended, **frame.failed}:
                if name not in names:
                    raise self._misfit(
                        f"the run has ended branch {name!r} of {frame.node.path!r}, which it has no more"
                    )
            for branch in frame.steps:
                is_over = branch.step.step in frame.ended or branch.step.step in frame.failed
                if not is_over and branch.path not in under_way:
                    raise self._misfit(f"step {branch.path!r} is a new branch, and the run is in its chorus already")

    def _misfit(self, problem: str) -> NondeterminismError:
        flow = self._flow
        return NondeterminismError(
            f"flow {flow.name!r}: {problem}",
            expected=problem,
            found=f"the tree of flow {flow.name!r}, version {flow.version!r}",
            source=f"flow {flow.name!r}, version {flow.version!r}",
        )
