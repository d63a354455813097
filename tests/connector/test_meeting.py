"""Where the scheduler and the worker of one rank find each other."""

from __future__ import annotations

from types import SimpleNamespace

from support.connector_rig import namespace_for, pages_cache

from s3kv.connector.meeting import join
from s3kv.identity import NamespaceSpec


class TestMeeting:
    class Half:
        pass

    def test_either_order_meets_and_engines_do_not_mix(self) -> None:
        first, second = SimpleNamespace(), SimpleNamespace()
        halves = [self.Half() for _ in range(6)]
        worker = join(first, 0, "worker", halves[0])
        other = join(second, 0, "scheduler", halves[1])
        assert join(first, 0, "scheduler", halves[2]) is worker
        assert join(second, 0, "worker", halves[3]) is other
        assert worker is not other
        assert join(first, 1, "worker", halves[4]) is not worker
        assert join(first, 0, "worker", halves[5]) is not worker  # another engine of the same arguments

    def test_who_comes_first_waits_for_nobody(self) -> None:
        class Listener:
            def __init__(self) -> None:
                self.heard: list[str] = []

            def start(self, namespace: NamespaceSpec, cache: object) -> None:
                self.heard.append(namespace.name)

        listener = Listener()
        cache, _ = pages_cache()
        namespace = namespace_for(cache)
        args, halves = SimpleNamespace(), (self.Half(), self.Half())
        room = join(args, 0, "worker", halves[0])
        room.publish(namespace, cache)
        join(args, 0, "scheduler", halves[1]).when_published(listener.start)
        assert listener.heard == [namespace.name]
        room.publish(namespace, cache)
        assert listener.heard == [namespace.name] * 2
        room.retract()
        late = Listener()
        room.when_published(late.start)
        assert late.heard == []

    def test_halves_that_are_gone_leave_no_room_behind(self) -> None:
        args = SimpleNamespace()
        half = self.Half()
        room = join(args, 0, "worker", half)
        del half
        keeper = self.Half()
        assert join(args, 0, "scheduler", keeper) is not room

    def test_arguments_without_weak_references_work_too(self) -> None:
        half, other = self.Half(), self.Half()
        args: dict[str, int] = {}
        assert join(args, 0, "worker", half) is join(args, 0, "scheduler", other)
