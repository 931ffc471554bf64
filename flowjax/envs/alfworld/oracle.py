"""A player that sees the true state and needs no search: it fetches, treats and puts away what the goal names."""

from collections.abc import Iterable, Mapping
from typing import Protocol

from flowjax.envs.alfworld.room import LIGHT, TREATMENTS, TWO, Goal, Room, View


class Command(Protocol):
    """A ground action: its name and what it is done to."""

    @property
    def action(self) -> str: ...

    @property
    def arguments(self) -> tuple[str, ...]: ...


class Oracle:
    """The next command in one state. `commands` are those that can be given now, by their text."""

    def __init__(self, room: Room, state: Iterable[tuple[str, ...]], commands: Mapping[str, Command], goal: Goal):
        self._view, self._commands, self._goal = View(room, state), commands, goal

    def choose(self) -> str:
        """A command that brings the goal nearer; where none does, one that changes nothing."""
        chosen = self._light() if self._goal.task_type == LIGHT else self._place()
        return chosen or self._give("look") or min(self._commands)

    def _light(self) -> str | None:
        if not self._holds_wanted():
            return self._fetch(self._view.of_kind(self._goal.object))
        lamps = self._view.of_kind(self._goal.target)
        if not lamps:
            return None
        lamp = min(lamps, key=lambda lamp: (not self._view.has(lamp, "istoggled"), lamp))
        return self._go(self._view.place_of[lamp]) or self._give("toggleobject", lamp)

    def _place(self) -> str | None:
        view, goal = self._view, self._goal
        wanted, action, tool_kind = TREATMENTS.get(goal.task_type, ("", "", ""))
        targets = view.places(goal.target, goal.object)
        if not targets:
            return None
        if self._holds_wanted():
            if wanted and not view.has(str(view.held), wanted):
                tools = sorted(place for place, kind in view.room.place_kind.items() if kind == tool_kind)
                return self._treat(action, tools)
            return self._put(self._target(targets))
        things = view.of_kind(goal.object)
        if goal.task_type == TWO:
            target = self._target(targets)
            things = [thing for thing in things if view.place_of[thing] != target]
        return self._fetch(sorted(things, key=lambda thing: not view.has(thing, wanted)), in_order=bool(wanted))

    def _target(self, targets: list[str]) -> str:
        """The receptacle to fill: for two objects the one that already holds most, else the nearest open one."""
        view = self._view
        if self._goal.task_type == TWO:
            kind = self._goal.object
            return min(targets, key=lambda place: (-view.inside(place, kind), view.closed(place), place))
        return min(targets, key=lambda place: (view.closed(place), not view.is_here(place), place))

    def _holds_wanted(self) -> bool:
        held = self._view.held
        return held is not None and self._view.room.kind.get(held) == self._goal.object

    def _treat(self, action: str, tools: list[str]) -> str | None:
        for tool in sorted(tools, key=lambda tool: (not self._view.is_here(tool), tool)):
            return self._go(tool) or self._give(action, str(self._view.held), tool)
        return None

    def _fetch(self, things: list[str], *, in_order: bool = False) -> str | None:
        """Towards holding one of `things`: the first if they are `in_order`, else the one that is easiest to get at."""
        view = self._view
        if view.held is not None:
            return self._drop()
        if not things:
            return None
        effort = {
            thing: (view.closed(view.place_of[thing]), not view.is_here(view.place_of[thing])) for thing in things
        }
        thing = things[0] if in_order else min(things, key=lambda thing: (*effort[thing], thing))
        place = view.place_of[thing]
        return self._go(place) or self._open(place) or self._give("pickupobject", thing, place)

    def _drop(self) -> str | None:
        """Put away what is held and not wanted, wherever it may lie."""
        view = self._view
        kind = view.room.kind.get(str(view.held), "")
        places = [place for place, its_kind in view.room.place_kind.items() if (its_kind, kind) in view.room.fits]
        if not places:
            return None
        return self._put(min(places, key=lambda place: (view.closed(place), not view.is_here(place), place)))

    def _put(self, place: str) -> str | None:
        return self._go(place) or self._open(place) or self._give("putobject", str(self._view.held), place)

    def _go(self, place: str) -> str | None:
        return None if self._view.is_here(place) else self._give("gotolocation", place)

    def _open(self, place: str) -> str | None:
        return self._give("openobject", place) if self._view.closed(place) else None

    def _give(self, action: str, *things: str) -> str | None:
        """The text of the command that does `action` to `things`."""
        for text, command in self._commands.items():
            if command.action == action and all(thing in command.arguments for thing in things):
                return text
        return None
