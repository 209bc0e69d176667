"""What must hold of each scenario of `scenarios`, whatever its transcript says."""

from __future__ import annotations

from elaunch.rendezvous.membership import Generation, slot_of
from tests.simulation.scripted import TRANSFER_S, Played

AT_ONCE_S = 0.02  # from a death to the generation without the dead, where nobody has to wait for a lease
LEASE_S = 5.0


def lost(before: Generation, after: Generation) -> set[str]:
    """Returns the members of one generation that are in the next one neither as members nor as leaving."""
    return set(before.ids) - {*after.ids, *after.leaving}


def is_urgent(generation: Generation) -> bool:
    return generation.aborts_step_before == generation.number


def urgent(played: Played) -> list[Generation]:
    """Returns the urgent generations after the first step."""
    return [one for one in played.training[1:] if is_urgent(one)]


def check_whole(played: Played, *, members: int, ended: int = 0) -> None:
    """Check that all went on to the end, in a generation of so many members, and that agents ended so many workers."""
    assert played.result.succeeded, played.result.message
    last = played.training[-1]
    assert len(last.ids) == members, f"the last generation has {last.ids}"
    assert len(played.ended_by_agents) == ended, f"agents ended {played.ended_by_agents}"
    assert all(played.world.nodes[node].exit.code == 0 for node in last.nodes)  # type: ignore[union-attr]
    steps = played.world.case.steps
    assert sorted(step for attempt, step in played.world.commits if attempt == last.attempt) == list(range(steps))


def undisturbed(played: Played) -> None:
    check_whole(played, members=4)
    assert [one.stage.value for one in played.generations] == ["start", "train"], "one to start, and one to train"
    assert not any("abort" in str(event) for event in played.world.events)
    assert played.pause_s() < 0.41, "each step follows the one before at once"


def one_worker_dies(played: Played) -> None:
    check_whole(played, members=4)
    first, without, whole = played.training
    assert is_urgent(without)
    assert lost(first, without) == {"n1/0#0"}
    assert not is_urgent(whole), "the replacement comes between two steps"
    assert lost(without, whole) == set(), "the survivors keep their processes"
    assert whole.ids == (*without.ids, "n1/0#1"), "survivors keep their order, and the joiner comes last"
    assert played.t_s("writes generation 3") - played.t_s("FAULT") < AT_ONCE_S
    assert played.committed_in(7) == {without.number: ["n0/0#0", "n1/1#0", "n0/1#0"]}, "the step is done by those left"
    assert played.pause_s() < 0.41 + TRANSFER_S + 0.41


def two_workers_die_at_once(played: Played) -> None:
    check_whole(played, members=4)
    (without,) = urgent(played)
    assert lost(played.training[0], without) == {"n0/1#0", "n1/0#0"}, "one generation for both deaths"
    assert "n0/1#0" in without.cause
    assert "n1/0#0" in without.cause
    assert set(without.ids) < set(played.training[-1].ids), "the survivors keep their processes"


def a_machine_is_lost(played: Played) -> None:
    check_whole(played, members=4)
    first, without = played.training
    assert lost(first, without) == {"n1/0#0", "n1/1#0"}
    assert is_urgent(without)
    delay_s = played.t_s("writes generation 3") - played.t_s("FAULT")
    assert LEASE_S <= delay_s < LEASE_S + AT_ONCE_S, f"it takes {delay_s:.3f} s, and the lease is the only news of it"
    played.in_order("n1 has lost its lease", "n0 writes generation 3")


def the_leaders_machine_is_lost(played: Played) -> None:
    check_whole(played, members=4)
    assert [one.leader for one in played.announced] == ["n0", "n0", "n2"]
    first, without = played.training
    assert lost(first, without) == {"n0/0#0", "n0/1#0"}
    played.in_order("n0 has lost its lease", "n2 leads", "n2 writes generation 3")
    assert played.t_s("writes generation 3") - played.t_s("FAULT") < LEASE_S + AT_ONCE_S


def a_node_joins(played: Played) -> None:
    check_whole(played, members=6)
    assert urgent(played) == [], "nobody is interrupted for joiners"
    assert played.training[-1].ids[:4] == played.training[0].ids, "members keep their ranks"
    assert not played.happens("n0/0#0 aborts")
    assert played.pause_s() < 0.41 + TRANSFER_S + 0.02, "the members wait for the transfer alone"


def a_worker_dies_while_another_joins(played: Played) -> None:
    check_whole(played, members=3)
    played.in_order("n2/0#1 receives", "n1/0#0 is ended", "n0 writes generation 4", "n2/0#1 begins")
    (without,) = urgent(played)
    assert without.ids == ("n0/0#0", "n2/0#1"), "the joiner stays, though it has no state yet"
    received = [event for event in played.world.events if str(event).startswith("n2/0#1 receives")]
    assert len(received) == 2, "once from each set of holders: the first transfer was interrupted"
    assert played.training[-1].ids[:2] == without.ids


def a_joiner_dies_while_it_joins(played: Played) -> None:
    check_whole(played, members=3)
    played.in_order("n2/0#1 receives", "n2/0#1 is ended", "n0 writes generation 4")
    (without,) = urgent(played)
    assert without.ids == played.training[0].ids, "the members go on as before"
    assert not played.happens("aborts"), "they were between two steps, and lose none"
    assert played.t_s("starts n2/0#2") - played.t_s("n2/0#1 is ended") >= 0.5, "the next one comes after a pause"


def a_node_drains(played: Played) -> None:
    check_whole(played, members=4)
    assert urgent(played) == []
    first, last = played.training
    assert set(last.leaving) == {"n1/0#0", "n1/1#0"}
    assert last.ids == tuple(one for one in first.ids if one not in last.leaving)
    assert not played.happens("aborts"), "who leaves commits the step under way with the others"
    assert played.committed_in(7).keys() == {first.number}
    assert len(played.committed_in(7)[first.number]) == 6
    assert played.world.nodes["n1"].exit.code == 0  # type: ignore[union-attr]
    assert played.pause_s() < 0.42, "nobody waits"


def a_member_dies_during_a_drain(played: Played) -> None:
    check_whole(played, members=2)
    first, leave, back, again, joined = played.training
    assert leave.leaving == ("n1/0#0",)
    assert is_urgent(back)
    assert lost(first, back) == {"n2/0#0"}
    assert "n1/0#0" in back.ids, "who was told to leave stays, since it still has what it is to give away"
    assert back.leaving == ()
    played.in_order("n1 reports: all its members have entered generation 4", "n0 writes generation 5")
    assert again.leaving == ("n1/0#0",), "it leaves once it has entered the generation of the loss"
    assert not is_urgent(again)
    assert joined.ids == ("n0/0#0", "n2/0#1")
    assert played.world.nodes["n1"].exit.code == 0  # type: ignore[union-attr]


def a_member_dies_as_a_drain_begins(played: Played) -> None:
    check_whole(played, members=2)
    first, without, leave, _ = played.training
    assert is_urgent(without)
    assert lost(first, without) == {"n2/0#0"}
    assert without.ids == ("n0/0#0", "n1/0#0"), "in an urgent generation nobody leaves"
    assert without.leaving == ()
    assert leave.leaving == ("n1/0#0",)
    assert not is_urgent(leave)
    assert set(played.committed_in(7)) == {without.number}
    assert sorted(played.committed_in(7)[without.number]) == ["n0/0#0", "n1/0#0"], (
        "it does the step again with the rest"
    )
    assert played.world.nodes["n1"].exit.code == 0  # type: ignore[union-attr]


def two_nodes_are_sick_at_once(played: Played) -> None:
    check_whole(played, members=2)
    assert urgent(played) == []
    first, without, joined, last = played.training
    assert (first.ids, without.ids) == (("n0/0#0", "n1/0#0", "n2/0#0"), ("n0/0#0", "n2/0#0"))
    assert [one.nodes for one in (joined, last)] == [("n0", "n2", "n3"), ("n0", "n3")]
    assert not any(one.hold for one in played.training), "the job never has fewer nodes than it needs"
    played.in_order("n2 says: this node stays in the job, which would have 1 of at least 2 nodes", "n3 starts")
    assert [played.world.nodes[node].exit.code for node in ("n1", "n2")] == [0, 0]  # type: ignore[union-attr]


def two_nodes_are_parted(played: Played) -> None:
    check_whole(played, members=3, ended=1)
    first, without, whole = played.training
    assert lost(first, without) == {"n2/0#0"}, "of two equal nodes the last is left out"
    assert played.committed_in(7) == {first.number: ["n0/0#0"]}, "who reached all others has committed the step"
    assert played.happens("n1/0#0 applies step 7 after all"), "so the one that did not follows"
    assert played.ended_by_agents == ["n2/0#0"]
    assert played.t_s("n2/0#1 ready") < played.t_s("FAULT ENDS"), "its replacement is ready"
    played.in_order("n2/0#1 ready", "FAULT ENDS", "n1 reports: it reaches", "n0 writes generation 4")
    assert whole.ids == ("n0/0#0", "n1/0#0", "n2/0#1"), "it joins only after the network is whole again"


def all_but_one_die(played: Played) -> None:
    check_whole(played, members=4)
    (without,) = urgent(played)
    assert without.ids == ("n1/1#0",), "one generation for all three"
    assert played.training[-1].ids[0] == "n1/1#0"
    assert played.committed_in(7) == {without.number: ["n1/1#0"]}, "the one that is left goes on alone"
    assert played.generations[-1].attempt == 0, "nothing is lost, so nothing starts again"


def all_die_and_start_again(played: Played) -> None:
    check_whole(played, members=4, ended=2)
    assert [(one.stage.value, one.attempt) for one in played.generations] == [
        ("start", 0),
        ("train", 0),
        ("assemble", 1),
        ("start", 1),
        ("train", 1),
    ]
    assert played.generations[-1].restarts.count == 1
    assert not played.generations[-1].begun
    assert set(played.ended_by_agents) == {"n0/0#1", "n1/0#1"}, "replacements of the attempt before are of no use"
    assert len(played.committed_in(0, attempt=1)) == 1, "the state is gone, so it begins with step 0"


def a_worker_dies_while_the_store_is_away(played: Played) -> None:
    check_whole(played, members=4)
    assert played.happens("FAULT ENDS")
    while_away = [one for one in played.announced if 3.0 < one.t_s < 6.0]
    assert while_away == []
    (without,) = urgent(played)
    assert lost(played.training[0], without) == {"n1/0#0"}, "nobody is taken for dead because the store was away"
    assert played.t_s("n1 starts n1/0#1") < played.t_s("FAULT ENDS"), "the replacement starts meanwhile"
    assert played.t_s("writes generation 3") - played.t_s("FAULT ENDS") < 0.1, "the peers' report is enough"


def a_node_loses_its_lease(played: Played) -> None:
    check_whole(played, members=3, ended=1)
    first, without, whole = played.training
    assert lost(first, without) == {"n1/0#0"}
    assert played.t_s("n1 has lost its lease") < played.t_s("n0 writes generation 3")
    assert played.committed_in(16).keys() == {first.number}, "it trains on until its lease ends"
    assert len(played.committed_in(16)[first.number]) == 3
    assert all("n1/0#0" not in who for step in range(17, 40) for who in played.committed_in(step).values())
    assert played.ended_by_agents == ["n1/0#0"], "the others went on without it"
    assert whole.ids == ("n0/0#0", "n2/0#0", "n1/0#1")


def a_sick_worker_is_replaced(played: Played) -> None:
    check_whole(played, members=4, ended=1)
    resets = [one for one in urgent(played) if one.ids == played.training[0].ids]
    assert len(resets) == 2, "links are made anew before a worker is replaced"
    replaced = urgent(played)[-1]
    assert lost(played.training[0], replaced) == {"n1/0#0"}, "the one to which most links fail"
    assert replaced.streak.replaced == ("n1/0#0",)
    assert played.ended_by_agents == ["n1/0#0"]
    assert set(replaced.ids) < set(played.training[-1].ids), "the others keep their processes"
    assert played.training[-1].streak.urgent <= len(urgent(played))


def a_worker_refuses_its_peers(played: Played) -> None:
    check_whole(played, members=4, ended=1)
    reset, without = urgent(played)
    assert reset.ids == played.training[0].ids, "a link between two that live is made anew"
    assert lost(reset, without) == {"n1/0#0"}, "one that cannot be reached counts as dead, though it runs"
    assert played.ended_by_agents == ["n1/0#0"]


def a_link_breaks(played: Played) -> None:
    check_whole(played, members=4)
    first, reset = played.training
    assert reset.ids == first.ids, "everybody stays"
    assert is_urgent(reset)
    assert reset.streak.resets == 1
    assert played.started == list(first.ids), "no process is started"
    assert sorted(played.committed_in(7)[first.number]) == ["n0/0#0", "n0/1#0", "n1/1#0"]
    assert played.happens("n1/0#0 applies step 7 after all"), "a step that some have committed counts for all"


def a_slot_is_given_up(played: Played) -> None:
    check_whole(played, members=3)
    of_slot = [worker for worker in played.started if slot_of(worker) == "n1/0"]
    assert of_slot == ["n1/0#0", "n1/0#1", "n1/0#2", "n1/0#3"], (
        "the first saw steps commit; of the rest there are three"
    )
    assert played.happens("it is not replaced: 3 workers in a row died here")
    pauses = [played.t_s(f"starts n1/0#{k + 1}") - played.t_s(f"n1/0#{k} is ended") for k in range(3)]
    assert [round(pause) if pause > 1 else round(pause, 1) for pause in pauses] == [0.0, 0.5, 2]
    assert set(played.training[-1].ids) == {"n0/0#0", "n0/1#0", "n1/1#0"}, "the others keep their processes"


def a_worker_dies_at_the_end(played: Played) -> None:
    check_whole(played, members=3)
    (without,) = urgent(played)
    assert lost(played.training[0], without) == {"n1/0#0"}
    played.in_order("n1/0#0 commits step 9", "n1/0#0 is ended", "n0 writes generation 3", "n0/0#0 has finished")
    assert set(played.committed_in(9)) == {played.training[0].number}, "the last step is not done again"
    assert played.t_s("RESULT") - played.t_s("FAULT") < 0.2, "nobody waits for the replacement"


def resized_from_2_to_4_nodes(played: Played) -> None:
    check_whole(played, members=4)
    assert urgent(played) == []
    assert len(played.training[0].nodes) == 2
    assert played.happens("this node waits as a spare")
    starts = [played.t_s("n2 starts n2/0"), played.t_s("n3 starts n3/0")]
    assert all(start_s > played.t_s("REQUEST") for start_s in starts), "spares start no workers before"
    assert set(played.training[-1].nodes) == {"n0", "n1", "n2", "n3"}


def resized_from_4_to_2_nodes(played: Played) -> None:
    check_whole(played, members=2)
    (last,) = played.training[1:]
    assert set(last.leaving) == {"n2/0#0", "n3/0#0"}, "those that joined last, both at one boundary"
    assert urgent(played) == []
    assert len(played.committed_in(7)[played.training[0].number]) == 4
    assert played.pause_s() < 0.42, "nobody waits"


def replacements_are_used_up(played: Played) -> None:
    check_whole(played, members=3)
    assert played.happens("it is not replaced: --max-restarts 1 is used up")
    assert [one for one in played.started if one.startswith("n1/")] == ["n1/0#0", "n1/1#0", "n1/0#1"]
    assert [len(one.ids) for one in played.training] == [4, 3, 4, 3], "the job goes on with fewer workers"
    assert played.generations[-1].attempt == 0


def too_few_nodes_are_left(played: Played) -> None:
    check_whole(played, members=3)
    _, held, whole = played.training
    assert held.hold
    assert held.ids == ("n0/0#0", "n2/0#0")
    assert not played.happens("n0/0#0 enters generation 3"), "members wait with the state that they have"
    assert whole.ids == ("n0/0#0", "n2/0#0", "n3/0#2"), "they are the same processes"
    assert not whole.hold
    assert set(played.committed_in(5)) == {whole.number}, "the step under way is done with the new node"


def a_spare_takes_the_place_of_a_lost_machine(played: Played) -> None:
    check_whole(played, members=6)
    first, after = played.training
    assert lost(first, after) == {"n1/0#0", "n1/1#0"}
    assert is_urgent(after)
    assert not after.hold
    assert [slot_of(one) for one in after.ids] == ["n0/0", "n0/1", "n3/0", "n3/1", "n2/0", "n2/1"], "rank for rank"
    assert played.t_s("n3 starts n3/0") > played.t_s("n0 writes generation 2"), "the script is known to use elaunch"
    assert played.t_s("n3/0#1 ready") < played.t_s("FAULT")
    assert set(played.committed_in(7)) == {after.number}
    assert len(played.committed_in(7)[after.number]) == 6, "the step under way is done by as many as before"
    assert not played.happens("n0/0#0 is ended"), "the survivors keep their processes"


def two_machines_are_lost_and_two_spares_take_their_places(played: Played) -> None:
    check_whole(played, members=3)
    first, after = played.training
    assert lost(first, after) == {"n0/0#0", "n1/0#0"}
    assert after.nodes == ("n3", "n4", "n2")
    assert not after.hold
    assert len(played.committed_in(7)[after.number]) == 3


def a_spare_dies_as_it_takes_a_place(played: Played) -> None:
    check_whole(played, members=3)
    _, promoted, again = played.training
    assert promoted.nodes == ("n0", "n3", "n2")
    assert again.nodes == ("n0", "n4", "n2"), "in the same place"
    assert played.committed_in(7).keys() == {again.number}
    assert played.generations[-1].attempt == 0, "nothing is lost, so nothing starts again"


def a_draining_node_is_replaced_by_a_spare(played: Played) -> None:
    check_whole(played, members=3)
    assert urgent(played) == []
    first, after = played.training
    assert (first.nodes, after.nodes) == (("n0", "n1", "n2"), ("n0", "n3", "n2"))
    assert after.leaving == ("n1/0#0",)
    assert not played.happens("aborts")
    assert {len(who) for step in range(20) for who in played.committed_in(step).values()} == {3}
    assert played.world.nodes["n1"].exit.code == 0  # type: ignore[union-attr]


def a_spare_that_holds_the_state_takes_the_place_of_a_lost_machine(played: Played) -> None:
    check_whole(played, members=4)
    _, joined, after, *_ = played.training
    assert (joined.nodes, joined.standby) == (("n0", "n1", "n2", "n3"), ("n3/0#1",))
    assert not is_urgent(joined)
    assert lost(joined, after) == {"n1/0#0"}
    assert (after.ids, after.standby) == (("n0/0#0", "n3/0#1", "n2/0#0"), ())
    assert is_urgent(after)
    assert played.t_s("n3/0#1 receives") < played.t_s("FAULT"), "it has the state before"
    assert not any(played.happens(f"{one} receives") for one in after.ids if one != "n3/0#1")
    assert {number: len(who) for number, who in played.committed_in(9).items()} == {after.number: 3}
    again, without, whole = played.training[3:]
    assert (again.standby, without.standby, whole.standby) == (("n4/0#3",), (), ("n4/0#4",))
    assert after.ids == again.working == without.working == whole.working, "whoever works keeps the rank"


def a_plan_is_asked_for_and_a_worker_dies(played: Played) -> None:
    check_whole(played, members=3)
    first, asked, without, whole = played.training
    assert asked.cause == "a new plan was asked for"
    assert asked.ids == first.ids
    assert not is_urgent(asked)
    assert {one.plan for one in (asked, without, whole)} == {asked.plan} != {""}, "a death does not lose the request"
    assert is_urgent(without)
    assert not played.happens("n0/0#0 enters generation 3"), "it comes before the boundary"


def a_slow_worker_is_replaced(played: Played) -> None:
    check_whole(played, members=3)
    first, without, whole = played.training
    assert without.leaving == ("n1/0#0",)
    assert urgent(played) == []
    assert len(played.committed_in(7)[first.number]) == 3, "it commits the step under way with the others"
    assert whole.ids == ("n0/0#0", "n2/0#0", "n1/0#1")
    played.in_order("n1/0#0 exits with 0", "n1 starts n1/0#1")
