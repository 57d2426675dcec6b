"""Sixteen threads resolve, call, bind, change policies and register; no choice is ever wrong."""

from __future__ import annotations

import random
import threading
import time

from vllm_fl.dispatch import (
    SelectionPolicy,
    policy_context,
    set_global_policy,
    with_preference,
)

OP = "silu_and_mul"
SECONDS = 60
FIRST = {"flagos": "default.flagos", "vendor": "vendor.a", "reference": "reference.torch"}


def test_threads(manager, impl):
    manager.registry.register_many([impl(i) for i in FIRST.values()])
    shared = manager.bind(OP)
    again = manager.resolve(OP)
    every_id = {*FIRST.values(), "vendor.b"}
    deadline = time.monotonic() + SECONDS
    wrong: list[object] = []
    rounds = [0] * 16

    def check(condition, *what):
        if not condition:
            wrong.append(what)

    def work(number):
        draw = random.Random(number)
        prefer = draw.choice(list(FIRST))
        try:
            with with_preference(prefer):
                mine = manager.bind(OP)
                while time.monotonic() < deadline and not wrong:
                    rounds[number] += 1
                    check(mine(1)[0] == FIRST[prefer], "bound", prefer, mine)
                    check(manager.call(OP, 1)[0] == FIRST[prefer], "called", prefer)
                    check(manager.resolve(OP)(1)[0] == FIRST[prefer], "resolved", prefer)
                    check(shared(1)[0] in every_id, "shared", shared)
                    other = draw.choice(list(FIRST))
                    with policy_context(SelectionPolicy(prefer=other)):
                        check(manager.call(OP, 1)[0] == FIRST[other], "nested", other)
                    action = draw.random()
                    if action < 0.1:
                        set_global_policy(SelectionPolicy(prefer=other))
                    elif action < 0.15:
                        manager.registry.register_impl(impl("vendor.b", again))
                        manager.registry.unregister(OP, "vendor.b")
                    elif action < 0.2:
                        manager.count_calls(draw.random() < 0.5)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert min(rounds) > 10
    for prefer, impl_id in FIRST.items():
        set_global_policy(SelectionPolicy(prefer=prefer))
        assert shared(1)[0] == manager.call(OP, 1)[0] == impl_id
