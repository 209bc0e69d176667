"""The recoveries of which tests/data/transcripts keeps the transcripts."""

from __future__ import annotations

from tests.simulation import scenario_checks as check
from tests.simulation.scripted import (
    Scenario,
    after,
    ask_for_plan,
    at,
    break_link,
    cut_off,
    deaf,
    drain,
    fail_soon,
    heal,
    kill,
    lose,
    lose_at_once,
    part,
    replace_worker,
    resize,
    sick,
    start,
    store_away,
)

SCENARIOS = (
    Scenario(
        "undisturbed",
        """
        A job of two nodes starts, trains and ends; nothing happens to it.
        Look for two generations: one that starts the workers, once all nodes are here, and one in which they train,
        once all are ready. After that the store is not written until the end.
        """,
        check.undisturbed,
        steps=10,
        shows_all=True,
    ),
    Scenario(
        "one_worker_dies",
        """
        A worker is killed in the middle of a step.
        Look for the generation without it within 10 ms (urgent: the step is aborted, and done again by the others),
        and for the one with its replacement, which the members enter between two steps. Nobody else is restarted.
        """,
        check.one_worker_dies,
        faults=(at(4.0, kill("n1/0")),),
    ),
    Scenario(
        "two_workers_die_at_once",
        """
        Two workers of different nodes are killed at the same moment.
        Look for one generation without both: the leader waits 5 ms for more news before it writes one.
        """,
        check.two_workers_die_at_once,
        faults=(at(4.0, kill("n0/1", "n1/0")),),
    ),
    Scenario(
        "a_machine_is_lost",
        """
        A machine is lost: its agent and its workers say nothing any more, and nothing answers at its address.
        Look for the end of its lease, 5 s later: only that tells a lost machine from a slow network. The others wait
        for it in the step, and then do the step again.
        """,
        check.a_machine_is_lost,
        nodes=3,
        faults=(at(4.0, lose("n1")),),
    ),
    Scenario(
        "the_leaders_machine_is_lost",
        """
        The machine of the node that leads is lost.
        Look for another node that leads as soon as the lease has ended, and writes the generation without the lost
        node from the documents in the store alone. The next number follows the last one.
        """,
        check.the_leaders_machine_is_lost,
        nodes=3,
        faults=(at(4.0, lose("n0")),),
    ),
    Scenario(
        "a_node_joins",
        """
        A third node comes to a job that trains with two.
        Look for members that train on while it starts: no step is aborted. Its two workers are not ready at the same
        moment, so there are two generations, of which the members enter only the second. They wait for the transfer.
        """,
        check.a_node_joins,
        max_nodes=3,
        faults=(at(3.0, start("n2")),),
    ),
    Scenario(
        "a_worker_dies_while_another_joins",
        """
        A member is killed while it sends the state to a joiner.
        Look for the joiner, which stays a member although it does not hold the state yet, and receives it again from
        those who are left. The step that committed before is not lost.
        """,
        check.a_worker_dies_while_another_joins,
        slots=1,
        max_nodes=3,
        faults=(at(3.0, start("n2")), after("n2/0#1 receives", kill("n1/0"), 0.1)),
    ),
    Scenario(
        "a_joiner_dies_while_it_joins",
        """
        A joiner is killed while it receives the state.
        Look for the members, which go on without it between two steps: they abort none. The next worker of that slot
        starts half a second later, since the one before has not seen a step commit.
        """,
        check.a_joiner_dies_while_it_joins,
        slots=1,
        max_nodes=3,
        faults=(at(3.0, start("n2")), after("n2/0#1 receives", kill("n2/0"), 0.1)),
    ),
    Scenario(
        "a_node_drains",
        """
        The agent of a node gets SIGTERM.
        Look for the step under way, which commits on all members, those of that node included; then they leave, and
        the others go on with the next step at once.
        """,
        check.a_node_drains,
        nodes=3,
        faults=(at(4.0, drain("n1")),),
    ),
    Scenario(
        "a_member_dies_during_a_drain",
        """
        A node is told to leave, and before the step boundary a member of another node is killed.
        Look for the one that was about to leave, taken back into the urgent generation 4, since it may have state that
        the others need. It leaves by generation 5, which is written after its node has entered the fourth.
        """,
        check.a_member_dies_during_a_drain,
        nodes=3,
        slots=1,
        faults=(at(3.9, drain("n1")), at(3.95, kill("n2/0"))),
    ),
    Scenario(
        "a_member_dies_as_a_drain_begins",
        """
        A node is told to leave, and within 5 ms a member of another node is killed.
        Look for the generation without the dead, in which the draining node stays; only the one after lets it go.
        """,
        check.a_member_dies_as_a_drain_begins,
        nodes=3,
        slots=1,
        faults=(at(4.0, drain("n1")), at(4.001, kill("n2/0"))),
    ),
    Scenario(
        "two_nodes_are_sick_at_once",
        """
        Two of three nodes find a device of theirs about to fail, at the same moment. The job needs two nodes.
        Look for the leader, which has the one leave of which it hears first, and the other one stay until a fourth
        node has joined.
        """,
        check.two_nodes_are_sick_at_once,
        nodes=3,
        slots=1,
        min_nodes=2,
        max_nodes=3,
        steps=60,
        faults=(at(4.0, fail_soon("n1", "n2")), at(12.0, start("n3"))),
    ),
    Scenario(
        "two_nodes_are_parted",
        """
        For 14 s nothing passes between two nodes of three; both reach the store and the third node.
        Look for step 7, which only n0 could commit, and which n1 applies by the agreement; for n2, which is left out
        (of equals the last one) and whose worker its agent ends; and for the new one, which joins after the cut.
        """,
        check.two_nodes_are_parted,
        nodes=3,
        slots=1,
        steps=60,
        faults=(at(4.0, part("n1", "n2")), at(18.0, heal("n1", "n2"))),
    ),
    Scenario(
        "all_but_one_die",
        """
        Of four workers three are killed at the same moment.
        Look for one generation with the last one, which holds the state and goes on alone with the same step, and for
        the transfer to all three replacements at one boundary.
        """,
        check.all_but_one_die,
        faults=(at(4.0, kill("n0/0", "n0/1", "n1/0")),),
    ),
    Scenario(
        "all_die_and_start_again",
        """
        All workers are killed at the same moment, and --max-restarts allows one restart of the job.
        Look for the new attempt: the nodes end what runs (SIGTERM to replacements that have just started), meet, and
        start all workers again. No state is left, and there is no checkpoint, so training begins with step 0.
        """,
        check.all_die_and_start_again,
        max_restarts=1,
        faults=(at(4.0, kill("n0/0", "n0/1", "n1/0", "n1/1")),),
    ),
    Scenario(
        "a_worker_dies_while_the_store_is_away",
        """
        Nobody can reach the store for 3 s; meanwhile a worker is killed.
        Look for the peers, which find it dead by themselves and wait, and for its replacement, which starts at once.
        When the store is back, the generation without the dead follows; nobody else is given up.
        """,
        check.a_worker_dies_while_the_store_is_away,
        faults=(at(3.0, store_away(3.0)), at(4.0, kill("n1/0"))),
    ),
    Scenario(
        "a_node_loses_its_lease",
        """
        One node cannot reach the store for 8 s, longer than its lease lasts; its worker is well.
        Look for its worker, which trains on until the lease ends and commits nothing after that: the others have gone
        on without it. Its agent ends it as soon as it hears of that, and starts another.
        """,
        check.a_node_loses_its_lease,
        nodes=3,
        slots=1,
        steps=40,
        faults=(at(3.0, cut_off("n1", 8.0)),),
    ),
    Scenario(
        "a_sick_worker_is_replaced",
        """
        From 4 s on all links of one worker fail, and fail again whenever they are made anew.
        Look for two generations of the same workers, whose links are made anew, and the third, which goes on without
        the worker to which most links failed. Its agent ends it and starts another. Step 7 is not done again.
        """,
        check.a_sick_worker_is_replaced,
        faults=(at(4.0, sick("n1/0")),),
    ),
    Scenario(
        "a_worker_refuses_its_peers",
        """
        A worker runs, but its links break and it refuses new ones.
        Look for its peers, which find nobody at its address and report it as dead. Its agent ends it, since the others
        went on without it.
        """,
        check.a_worker_refuses_its_peers,
        faults=(at(4.0, deaf("n1/0")),),
    ),
    Scenario(
        "a_link_breaks",
        """
        The link between two workers breaks once; both are well.
        Look for a generation of the same workers, in which the link is made anew, and for step 7: three members had
        passed its barrier, so the fourth applies it by the agreement instead of all doing it again.
        """,
        check.a_link_breaks,
        faults=(at(4.0, break_link("n0/1", "n1/0")),),
    ),
    Scenario(
        "a_slot_is_given_up",
        """
        A worker is killed, and each that replaces it is killed before it sees a step commit.
        Look for the pauses before each start (0, 0.5 and 2 s) and for the third such death, after which the slot stays
        empty. The others lose no step by it.
        """,
        check.a_slot_is_given_up,
        steps=30,
        faults=(
            at(4.0, kill("n1/0")),
            *(after(f"n1/0#{number} receives", kill("n1/0"), 0.1) for number in (1, 2, 3)),
        ),
    ),
    Scenario(
        "a_worker_dies_at_the_end",
        """
        A worker is killed after the last step has committed, before it comes to the last barrier.
        Look for the others, which pass that barrier in a generation without it: no step is done again, the job
        succeeds, and nobody waits for the replacement, which is ended.
        """,
        check.a_worker_dies_at_the_end,
        steps=10,
        faults=(after("n1/0#0 commits step 9", kill("n1/0")),),
    ),
    Scenario(
        "resized_from_2_to_4_nodes",
        """
        Two more nodes wait as spares of a job of two, until somebody asks for four.
        Look for spares that start no workers before they have a place, and for members that abort nothing.
        """,
        check.resized_from_2_to_4_nodes,
        slots=1,
        max_nodes=2,
        steps=30,
        faults=(at(2.0, start("n2", "n3")), at(4.0, resize(1, 4))),
    ),
    Scenario(
        "resized_from_4_to_2_nodes",
        """
        Somebody asks that a job of four nodes has two.
        Look for the nodes that joined last: both leave at the same boundary, after the step under way has committed.
        """,
        check.resized_from_4_to_2_nodes,
        slots=1,
        nodes=4,
        faults=(at(4.0, resize(1, 2)),),
    ),
    Scenario(
        "replacements_are_used_up",
        """
        With --max-restarts 1 two workers of a node die, one after the other.
        Look for the first, which is replaced, and the second, which is not: the others go on, and no attempt begins.
        """,
        check.replacements_are_used_up,
        max_restarts=1,
        faults=(at(3.0, kill("n1/0")), at(6.0, kill("n1/1"))),
    ),
    Scenario(
        "too_few_nodes_are_left",
        """
        A machine is lost from a job that needs three nodes; another comes later.
        Look for the generation that says hold: the members keep their state and enter nothing. The one with the new
        node goes on with the same step.
        """,
        check.too_few_nodes_are_left,
        slots=1,
        nodes=3,
        min_nodes=3,
        faults=(at(3.0, lose("n1")), at(12.0, start("n3"))),
    ),
    Scenario(
        "a_spare_takes_the_place_of_a_lost_machine",
        """
        A machine is lost from a job of three nodes, which needs all three and has one spare.
        Look for the workers of the spare, which start once the job trains and are ready long before; for generation 3,
        in which they have the ranks of the lost ones; and for step 7, which is done again by as many as before.
        """,
        check.a_spare_takes_the_place_of_a_lost_machine,
        nodes=4,
        min_nodes=3,
        spares=1,
        faults=(at(4.0, lose("n1")),),
    ),
    Scenario(
        "two_machines_are_lost_and_two_spares_take_their_places",
        """
        Two machines of three are lost at the same moment, among them that of the leader; there are two spares.
        Look for one generation with both spares, and for the last node of the first three, which gives them the state.
        """,
        check.two_machines_are_lost_and_two_spares_take_their_places,
        nodes=5,
        slots=1,
        min_nodes=3,
        spares=2,
        faults=(at(4.0, lose_at_once("n0", "n1")),),
    ),
    Scenario(
        "a_spare_dies_as_it_takes_a_place",
        """
        A machine is lost, and the spare that takes its place is lost while it receives the state.
        Look for the second spare, which takes the same place; the step of the first loss is done once, by three.
        """,
        check.a_spare_dies_as_it_takes_a_place,
        nodes=5,
        slots=1,
        min_nodes=3,
        spares=2,
        steps=30,
        faults=(at(4.0, lose("n1")), after("n3/0#1 receives", lose("n3"), 0.1)),
    ),
    Scenario(
        "a_draining_node_is_replaced_by_a_spare",
        """
        The agent of a node gets SIGTERM; the job has a spare.
        Look for one planned generation in which the node leaves and the spare has its ranks, and for the steps, none
        of which is aborted or done by fewer.
        """,
        check.a_draining_node_is_replaced_by_a_spare,
        nodes=4,
        slots=1,
        min_nodes=3,
        spares=1,
        faults=(at(4.0, drain("n1")),),
    ),
    Scenario(
        "a_spare_that_holds_the_state_takes_the_place_of_a_lost_machine",
        """
        A machine is lost from a job of three nodes; its spare holds the state, and follows each step. Later another
        machine comes, and its worker dies once it is a spare.
        Look for generation 3, in which the spare becomes a member on standby, and receives the state; for generation 4,
        in which it has the ranks of the lost ones, and nobody receives anything; and for step 9, done again by three.
        """,
        check.a_spare_that_holds_the_state_takes_the_place_of_a_lost_machine,
        nodes=4,
        slots=1,
        min_nodes=3,
        spares=1,
        spare_state=True,
        steps=40,
        faults=(at(5.0, lose("n1")), at(8.0, start("n4")), at(13.0, kill("n4/0"))),
    ),
    Scenario(
        "a_plan_is_asked_for_and_a_worker_dies",
        """
        Somebody asks for another plan, and before the step boundary a worker is killed.
        Look for the plan, which the urgent generation carries on, and for the reports that all go by it.
        """,
        check.a_plan_is_asked_for_and_a_worker_dies,
        slots=1,
        nodes=3,
        faults=(at(3.9, ask_for_plan()), after("n0 writes generation 3", kill("n2/0"), 0.01)),
    ),
    Scenario(
        "a_slow_worker_is_replaced",
        """
        A worker is too slow and is to be replaced.
        Look for the step under way, which it commits with the others before it leaves; its replacement starts when
        it has ended, and joins between two steps.
        """,
        check.a_slow_worker_is_replaced,
        slots=1,
        nodes=3,
        faults=(at(4.0, replace_worker("n1/0", "it is slow")),),
    ),
)
