"""Draws the table of `elaunch.agent.decisions.slots` into docs/architecture.md: `python -m tests.slot_diagram`."""

from __future__ import annotations

from collections.abc import Iterable

from elaunch.agent.decisions.slots import IGNORED, TRANSITIONS, SlotEvent, SlotState, Transition
from tests.helpers import ROOT

DOCUMENT = ROOT / "docs" / "architecture.md"
BEGIN = "<!-- slots: made by python -m tests.slot_diagram -->"
END = "<!-- slots: end -->"

# They lead from each state of a process to EMPTY, LEFT or ENDED, and from there to EMPTY: in the table alone.
NOT_DRAWN = (SlotEvent.EXIT_DRAINING, SlotEvent.EXIT_UNJUDGED, SlotEvent.RESET)


def draw() -> str:
    """Returns the states, a diagram of the changes of state, and what is ignored, as Markdown."""
    return "\n\n".join((BEGIN, _states(), _diagram(), _rows(), _ignored(), END))


def drawn() -> str:
    """Returns what stands in the document at present, markers included."""
    text = DOCUMENT.read_text()
    return text[text.index(BEGIN) : text.index(END) + len(END)]


def _states() -> str:
    lines = ["| state | of the worker or the slot | reported as |", "|---|---|---|"]
    for state in SlotState:
        reported = f"`{state.reported.value}`" if state.reported else ""
        lines.append(f"| {state.name} | {state.value} | {reported} |")
    return "\n".join(lines)


def _diagram() -> str:
    edges: dict[tuple[SlotState, SlotState], list[str]] = {}
    for state, event in _cells_in_order():
        for row in TRANSITIONS[state, event] if event not in NOT_DRAWN else ():
            names = edges.setdefault((state, row.state), [])
            if row.state is not state and event.name not in names:
                names.append(event.name)
    lines = ["```mermaid", "stateDiagram-v2", "    [*] --> EMPTY"]
    lines += [
        f"    {state.name} --> {after.name}: {', '.join(names)}" for (state, after), names in edges.items() if names
    ]
    return "\n".join((*lines, "```"))


def _cells_in_order() -> list[tuple[SlotState, SlotEvent]]:
    return [(state, event) for state in SlotState for event in SlotEvent if (state, event) in TRANSITIONS]


def _rows() -> str:
    lines = ["| event | in | if | next | then |", "|---|---|---|---|---|"]
    for event in SlotEvent:
        found: dict[tuple[str, str, str], set[SlotState]] = {}
        for state in (state for state, other in _cells_in_order() if other is event):
            for row in TRANSITIONS[state, event]:
                found.setdefault(_cells(state, row), set()).add(state)
        meaning = f"{event.name}: {event.value}"
        for cells, states in found.items():
            lines.append(f"| {' | '.join((meaning, _names(states), *cells))} |")
            meaning = ""
    return "\n".join(lines)


def _cells(state: SlotState, row: Transition) -> tuple[str, str, str]:
    """Returns condition, next state and effects of a row."""
    after = "" if row.state is state else row.state.name
    return row.guard.value, after, ", ".join(effect.value for effect in row.effects)


def _ignored() -> str:
    lines = ["| ignored | in | because |", "|---|---|---|"]
    for group in IGNORED:
        events = ", ".join(event.name for event in SlotEvent if event in group.events)
        lines.append(f"| {events} | {_names(group.states)} | {group.reason} |")
    return "\n".join(lines)


def _names(states: Iterable[SlotState]) -> str:
    wanted = set(states)
    return ", ".join(state.name for state in SlotState if state in wanted)


if __name__ == "__main__":
    text = DOCUMENT.read_text()
    DOCUMENT.write_text(text.replace(drawn(), draw()))
