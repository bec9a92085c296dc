"""Plans, interpreted in the most obvious way: everything is worked out anew from what has ended so far.

It shares no code with the interpreter of the product but the parser of documents. It answers one question: given the
outcomes so far, in order, which steps are open, with which input, or how has the run ended?
"""

import random
import re
from dataclasses import dataclass, field
from typing import Any

import jmespath

ENDED = ("SUCCESS", "FAILED", "UNMET", "BLOCKED")


@dataclass
class Outlook:
    """What should be so by now."""

    open: dict[str, Any] = field(default_factory=dict)
    """The open steps, with their input."""

    result: Any = None
    failed_at: str | None = None
    is_done: bool = False


def fill(value: Any, data: dict[str, Any]) -> Any:
    if isinstance(value, str):
        whole = re.fullmatch(r"\$\{(.*)\}", value)
        return jmespath.search(whole[1], data) if whole else value
    if isinstance(value, dict):
        return {key: fill(inner, data) for key, inner in value.items()}
    return [fill(inner, data) for inner in value] if isinstance(value, list) else value


def named_steps(value: Any, only_outputs: bool = False) -> set[str]:
    if isinstance(value, str):
        return set(re.findall(r"steps\.(\w+)\.output" if only_outputs else r"steps\.(\w+)", value))
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return {name for part in parts for name in named_steps(part, only_outputs)}


class Naive:
    """A plan and its inputs."""

    def __init__(self, plan: dict[str, Any], inputs: dict[str, Any]) -> None:
        self.plan = plan
        self.steps = {step["id"]: step for step in plan["steps"]}
        self.inputs = inputs

    def depends_on(self, step: dict[str, Any]) -> set[str]:
        fields = ("input", "when", "for_each")
        return set(step.get("depends_on", ())).union(*(named_steps(step.get(name)) for name in fields))

    def outlook(self, outcomes: dict[str, tuple[bool, Any]]) -> Outlook:
        """Return what should be so after these outcomes, by step: whether it went well, and the value or the error."""
        known: dict[str, dict[str, Any]] = {}
        found = Outlook()
        failed = [path for path, (is_good, _) in outcomes.items() if not is_good and ":" not in path]
        fatal = [path for path in failed if self._is_fatal(path)]
        if fatal:
            return self._after(fatal[0], outcomes, known)
        moved = True
        while moved:
            moved = False
            for name, step in self.steps.items():
                if name in known or not all(other in known for other in self.depends_on(step)):
                    continue
                stands = self._stands(step, known, outcomes, found)
                if stands is not None:
                    known[name] = stands
                    moved = True
        if len(known) == len(self.steps):
            found.is_done = True
            last = [name for name in self.steps if not any(name in self.depends_on(s) for s in self.steps.values())]
            found.result = {name: known[name]["output"] for name in last}
        return found

    def _is_fatal(self, path: str) -> bool:
        return bool(self.steps[path.partition("[")[0]].get("on_failure", "fail") != "continue")

    def _after(self, path: str, outcomes: dict[str, Any], known: dict[str, Any]) -> Outlook:
        """Return what is so after a failure that ends the run: compensations, one after the other."""
        name = path.partition("[")[0]
        undo = []
        if self.steps[name].get("on_failure") == "compensate":
            before = list(outcomes)[: list(outcomes).index(path)]
            done = [each for each in before if outcomes[each][0] and "compensate" in self.steps[each.partition("[")[0]]]
            undo = [f"{each}:compensate" for each in reversed(done)]
        for each in undo:
            if each not in outcomes:
                of = each.partition(":")[0]
                return Outlook(open={each: {"v": outcomes[of][1]}}, failed_at=path)
        return Outlook(failed_at=path, is_done=True)

    def _stands(
        self, step: dict[str, Any], known: dict[str, Any], outcomes: dict[str, Any], found: Outlook
    ) -> dict[str, Any] | None:
        """Return how a step has ended; None if it is open."""
        data = {"inputs": self.inputs, "steps": {name: self._seen(stands) for name, stands in known.items()}}
        nothing = {"output": None, "error": None}
        if "when" in step:
            if not fill(step["when"], data):
                return {"stands": "UNMET", **nothing}
        else:
            needed = named_steps(step.get("input"), True) | named_steps(step.get("for_each"), True)
            others = {name: known[name]["stands"] for name in self.depends_on(step)}
            if any(stands in ("FAILED", "BLOCKED") for stands in others.values()):
                return {"stands": "BLOCKED", **nothing}
            if any(others[name] == "UNMET" for name in needed):
                return {"stands": "UNMET", **nothing}
        if "for_each" in step:
            return self._items(step, data, outcomes, found)
        if step["id"] not in outcomes:
            found.open[step["id"]] = fill(step.get("input", {}), data)
            return None
        return self._ended(outcomes[step["id"]])

    def _items(
        self, step: dict[str, Any], data: dict[str, Any], outcomes: dict[str, Any], found: Outlook
    ) -> dict[str, Any] | None:
        items = fill(step["for_each"], data)
        ended = [n for n in range(len(items)) if f"{step['id']}[{n}]" in outcomes]
        left = [n for n in range(len(items)) if n not in ended]
        for n in left[: step.get("max_concurrency", len(items))]:
            found.open[f"{step['id']}[{n}]"] = fill(step.get("input", {}), {**data, "item": items[n], "index": n})
        if left:
            return None
        each = [self._ended(outcomes[f"{step['id']}[{n}]"]) for n in range(len(items))]
        # The first error is the one that came first.
        errors = [outcomes[path][1] for path in outcomes if path.startswith(step["id"] + "[") and not outcomes[path][0]]
        stands = "FAILED" if errors else "SUCCESS"
        return {"stands": stands, "output": [one["output"] for one in each], "error": errors[0] if errors else None}

    def _ended(self, outcome: tuple[bool, Any]) -> dict[str, Any]:
        is_good, value = outcome
        return {
            "stands": "SUCCESS" if is_good else "FAILED",
            "output": value if is_good else None,
            "error": None if is_good else value,
        }

    def _seen(self, stands: dict[str, Any]) -> dict[str, Any]:
        status = stands["stands"] if stands["stands"] in ("SUCCESS", "FAILED") else "SKIPPED"
        error = None if stands["error"] is None else {"code": stands["error"]}
        return {"status": status, "output": stands["output"], "error": error}


def random_plan(rng: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a plan, and inputs for a run of it. Its steps stand in any order."""
    steps: list[dict[str, Any]] = []
    names = [f"s{n}" for n in range(rng.randint(1, 9))]
    for n, name in enumerate(names):
        before = names[:n]
        step: dict[str, Any] = {"id": name}
        if before and rng.random() < 0.6:
            step["depends_on"] = rng.sample(before, rng.randint(1, min(3, n)))
        if before and rng.random() < 0.4:
            other = rng.choice(before)
            references = [f"${{steps.{other}.output}}", f"${{steps.{other}.status}}", f"${{steps.{other}.error.code}}"]
            step["input"] = {"v": rng.choice(references), "n": "${inputs.n}"}
        if before and rng.random() < 0.3:
            other = rng.choice(before)
            conditions = [f"${{steps.{other}.status == 'SUCCESS'}}", f"${{steps.{other}.output}}", "${inputs.flag}"]
            step["when"] = rng.choice(conditions)
        if rng.random() < 0.25:
            step["for_each"] = rng.choice([[1, 2, 3], [], "${inputs.items}", [{"a": "${inputs.n}"}]])
            step.setdefault("input", {})["item"] = "${item}"
            if rng.random() < 0.5:
                step["max_concurrency"] = rng.randint(1, 2)
        kind = rng.choice(["activity"] * 5 + ["signal", "sleep"])
        if kind != "activity" and ("for_each" in step or "input" in step):
            kind = "activity"
        step[kind] = {"activity": "act", "signal": f"sig-{name}", "sleep": 5}[kind]
        if kind == "activity":
            step["on_failure"] = rng.choice(["fail", "continue", "continue", "compensate"])
            if rng.random() < 0.4:
                step["compensate"] = {"activity": "undo", "input": {"v": "${output}"}}
        steps.append(step)
    rng.shuffle(steps)
    plan: dict[str, Any] = {"plan": "p", "version": "1", "steps": steps}
    plan["inputs"] = {"n": {"type": "integer"}, "flag": {}, "items": {"default": [7, 8]}}
    return plan, {"n": rng.randint(0, 9), "flag": rng.choice([True, False, None]), "items": [7, 8]}
