"""Each sentence about the controller in docs/security.md has tests, which this table names."""

import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

SECURITY = Path(__file__).parents[4] / "docs" / "security.md"

FILES = {
    "chart": "tests/chart/test_chart.py",
    "claims": "tests/fast/extras/controller/test_claims.py",
    "answer_rules": "tests/fast/extras/controller/test_answer_rules.py",
    "cluster": "tests/contract/test_cluster.py",
    "ending": "tests/fast/extras/controller/test_ending.py",
    "enrolment": "tests/fast/extras/controller/test_enrolment.py",
    "evacuator": "tests/fast/extras/evacuation/test_evacuator.py",
    "grants": "tests/fast/extras/transfer/test_grants.py",
    "health_events": "tests/fast/extras/controller/test_health_events.py",
    "lists": "tests/fast/extras/kubernetes/test_lists.py",
    "lost_claims": "tests/fast/extras/evacuation/test_lost_claims.py",
    "membership": "tests/fast/extras/controller/test_membership.py",
    "node_moves": "tests/fast/extras/transfer/test_node_moves.py",
    "moves_back": "tests/fast/extras/transfer/test_moves_back.py",
    "nodes": "tests/fast/extras/controller/test_nodes.py",
    "process": "tests/fast/daemon/test_process.py",
    "transfer_rules": "tests/fast/extras/controller/test_transfer_rules.py",
    "whose_group": "tests/fast/extras/controller/test_whose_group.py",
}
TESTS = {
    "In a cluster with a controller, each node also serves the controller": (
        "cluster: a_node_serves_the_controller_nothing_but_its_services",
    ),
    "complete the TLS 1.3 handshake with a node, without a certificate": (
        "cluster: without_a_certificate_no_call_reaches_a_node",
        "cluster: only_the_controller_may_call_a_node",
    ),
    "enrol without the token of a node": ("enrolment: a_token_that_proves_no_node_is_refused",),
    "delay other callers by large requests or idle connections": (
        "cluster: large_requests_and_slow_clients_hold_up_no_call",
        "enrolment: large_requests_and_slow_clients_hold_up_no_enrolment",
        "enrolment: a_host_that_sends_what_is_no_token_delays_no_other",
        "enrolment: a_request_that_cannot_be_read_is_refused",
    ),
    "call another node": ("cluster: only_the_controller_may_call_a_node",),
    "answer for another node, even at the address of that node": (
        "cluster: a_node_with_another_s_key_is_not_believed",
        "enrolment: an_address_of_another_host_leads_nowhere",
        "nodes: no_part_of_an_address_is_taken_for_a_scheme",
    ),
    "get a certificate for another name": (
        "enrolment: a_signing_request_s_own_names_are_not_signed",
        "enrolment: a_node_is_named_as_the_node_of_its_pod",
    ),
    "take over a volume group that another node has": (
        "nodes: another_node_s_claim_to_a_group_changes_nothing_for_what_is_there",
        "nodes: a_node_keeps_its_groups_while_its_pod_is_replaced",
        "nodes: whatever_one_node_says_costs_its_own_calls_only",
    ),
    "learn on which nodes the volumes of others are": (
        "claims: what_is_not_known_or_no_volume_of_carver_s_has_no_place",
        "claims: the_name_of_a_source_is_one_part_of_a_path",
    ),
    "delay claims of other namespaces by the contents of one namespace": (
        "claims: what_takes_long_in_one_namespace_delays_no_claim_of_another",
        "claims: a_question_that_no_call_waits_for_any_more_keeps_its_turn_until_it_ends",
    ),
    "name a volume, snapshot, node or topology of another node": (
        "nodes: an_answer_that_names_what_is_another_s_reaches_no_caller",
        "nodes: a_stream_ends_where_a_node_lies",
        "answer_rules: whatever_is_changed_an_answer_that_passes_names_nothing_of_another",
        "answer_rules: with_any_one_field_changed_an_answer_names_nothing_of_another",
        "answer_rules: a_lie_is_refused_by_the_field_that_gives_it_away",
        "answer_rules: each_rpc_that_the_controller_passes_on_has_a_row_and_an_honest_answer_here",
        "answer_rules: each_field_of_an_answer_has_a_rule",
    ),
    "fill the controller's memory by large pods and claims": (
        "lists: of_what_users_make_as_large_as_they_like_little_is_read_at_once_and_kept",
        "lists: a_page_that_is_too_long_is_read_in_smaller_ones",
    ),
    "delay Events of other namespaces": (
        "health_events: claims_of_a_namespace_that_takes_no_events_delay_no_other_s",
    ),
    "fill the log with invalid tokens": ("enrolment: callers_that_are_no_nodes_fill_no_log",),
    "give a claim the volume of another claim": (
        "nodes: an_answer_that_names_what_is_another_s_reaches_no_caller",
        "answer_rules: a_lie_is_refused_by_the_field_that_gives_it_away",
    ),
    "get a claim, a request or a secret that is for the topology of another node": (
        "nodes: a_node_that_says_another_s_topology_gets_no_claim_and_no_secret_of_that_one",
        "nodes: whatever_one_node_says_costs_its_own_calls_only",
    ),
    "hide, add or replace the entries of other nodes in a list": (
        "nodes: no_claim_to_another_s_group_makes_the_list_of_health_shorter",
        "nodes: a_list_in_which_a_node_lies_is_refused_and_the_others_are_found_by_id",
        "nodes: the_health_of_another_s_volumes_is_left_out_of_the_list",
    ),
    "hold up a call, an Event or a list of another node": (
        "nodes: an_answer_without_a_message_is_refused_and_costs_its_node_s_calls_only",
        "nodes: a_volume_that_may_be_anywhere_is_made_though_one_node_answers_nothing",
        "nodes: whatever_breaks_while_a_node_is_asked_is_that_node_s_problem",
        "nodes: a_page_is_never_larger_than_a_sidecar_takes",
        "nodes: a_list_that_goes_on_without_an_end_ends_with_the_node_s_name",
        "nodes: what_is_left_out_of_a_list_counts_as_an_entry_of_its_node",
        "nodes: a_node_of_many_pages_has_no_other_asked_again_for_each",
        "nodes: what_a_node_says_of_itself_is_not_parsed_where_it_is_too_long",
        "answer_rules: elements_are_counted_before_any_is_looked_at",
        "answer_rules: an_answer_with_more_bytes_than_an_honest_one_is_not_parsed",
        "health_events: a_node_that_answers_nothing_costs_no_other_its_events",
        "health_events: conditions_of_one_node_delay_no_other_s",
        "health_events: what_one_node_says_takes_no_memory_without_end",
        "health_events: names_that_no_object_can_have_cost_no_other_its_events",
        "health_events: a_node_that_does_not_say_what_is_over_delays_no_other",
        "answer_rules: an_id_is_no_longer_than_names_of_lvm",
    ),
    "put keys that are not Carver's, or more than 4 KiB, into": (
        "answer_rules: each_map_of_an_answer_is_one_of_those_that_are_bounded",
        "answer_rules: a_context_has_few_bytes_and_carver_s_keys_only",
    ),
    "put a size of more than 64 GiB above the requested size": (
        "answer_rules: a_new_volume_is_no_larger_than_what_was_asked_for_rounded_up",
    ),
    "use a token whose pod was deleted": (
        "enrolment: a_token_counts_no_longer_once_another_came_for_its_node",
        "enrolment: a_token_counts_no_longer_than_its_node",
    ),
    "use a token that was made for an earlier Node of the same name": (
        "enrolment: a_token_of_an_earlier_node_proves_none",
        "enrolment: who_enrolled_as_an_earlier_node_is_not_called_as_the_next",
        "membership: who_proved_to_be_an_earlier_node_has_not_enrolled_as_the_next",
    ),
    "have thousands of certificates signed": (
        "enrolment: a_node_gets_ten_certificates_at_once_and_then_one_in_ten_seconds",
    ),
    "have thousands of lines of the log written": (
        "enrolment: a_node_gets_ten_certificates_at_once_and_then_one_in_ten_seconds",
        "enrolment: a_node_that_enrols_at_another_address_each_time_fills_no_log",
    ),
    "have a volume of another node deleted": (
        "nodes: no_error_of_a_node_has_a_call_about_its_volume_carried_out_elsewhere",
        "answer_rules: a_node_cannot_have_done_what_was_asked_about_another_s",
    ),
    "Root on a node has the key and the token": (
        "nodes: an_answer_that_names_what_is_another_s_reaches_no_caller",
        "nodes: no_error_of_a_node_has_a_call_about_its_volume_carried_out_elsewhere",
        "nodes: a_node_gets_the_secrets_of_its_own_calls_and_of_lists",
    ),
    "An attacker with the key or the token of a node can lie about": (
        "answer_rules: a_node_is_believed_what_it_says_of_its_own",
    ),
    "The attacker can also do the following": (
        "nodes: a_node_gets_the_secrets_of_its_own_calls_and_of_lists",
        "nodes: a_node_that_overstates_its_room_draws_volumes_that_may_be_anywhere",
        "nodes: a_list_in_which_a_node_lies_is_refused_and_the_others_are_found_by_id",
        "nodes: a_list_that_a_node_refuses_names_that_node",
        "nodes: a_hung_node_holds_up_a_volume_that_may_be_anywhere_for_a_moment",
        "nodes: no_capacity_of_one_node_breaks_the_sum_of_all",
        "nodes: the_health_of_another_s_volumes_is_left_out_of_the_list",
    ),
    "A text from a node cannot forge a line": (
        "nodes: what_a_node_says_is_shown_without_control_characters",
        "process: a_message_with_another_s_text_is_one_line_of_the_log",
    ),
    "The attacker can do nothing more": (
        "answer_rules: whatever_is_changed_an_answer_that_passes_names_nothing_of_another",
        "answer_rules: with_any_one_field_changed_an_answer_names_nothing_of_another",
        "answer_rules: each_rpc_of_the_wire_has_a_row_or_is_the_controller_s_or_not_served",
        "nodes: of_two_that_claim_a_group_none_is_called_but_the_one_that_is_named",
    ),
    "use a version of TLS before 1.3": (
        "cluster: only_tls_1_3_is_spoken",
        "enrolment: enrolment_speaks_tls_1_3_only",
    ),
    "A node proves its name by the token": (
        "enrolment: a_token_that_proves_no_node_is_refused",
        "enrolment: without_the_node_in_the_token_its_pod_says_which",
    ),
    "If a PersistentVolume names a node for a volume": (
        "membership: whatever_happens_to_nodes_and_controllers_the_rule_holds",
        "nodes: of_two_that_claim_a_group_none_is_called_but_the_one_that_is_named",
    ),
    "Such a claim counts only for new volumes": (
        "membership: a_silent_node_of_which_nothing_is_known_holds_up_groups_without_volumes_only",
        "membership: no_volume_of_a_new_one_s_is_taken_for_that_of_a_silent_node",
    ),
    "Calls for volumes and snapshots that existed before": (
        "whose_group: a_snapshot_is_deleted_on_its_node_or_nowhere",
        "whose_group: a_silent_node_keeps_its_snapshots_though_another_group_of_its_is_named",
        "whose_group: the_volumes_of_a_deleted_node_go_to_no_node_that_claims_its_group",
    ),
    "With certificates from files the controller knows": (
        "nodes: with_nodes_from_files_the_claim_of_one_alone_counts_at_once",
    ),
    "An attacker who has the key of a stolen node": (
        "nodes: of_two_that_claim_a_group_none_is_called_but_the_one_that_is_named",
        "nodes: nothing_is_made_where_a_group_is_claimed_by_two",
    ),
    "Root on a node can write the labels": (
        "claims: no_node_s_label_keeps_claims_waiting_for_a_node_that_is_gone",
        "membership: the_labels_of_a_node_do_not_make_it_another",
    ),
    "Neither the controller nor a node logs secrets": (
        "cluster: secrets_are_in_no_log_of_either_side",
        "enrolment: a_node_enrols_and_is_reached",
        "enrolment: a_token_that_proves_no_node_is_refused",
        "ending: a_controller_ends_in_time_whatever_hangs",
    ),
    "Only root can open the controller's socket": (
        "nodes: the_controller_s_socket_is_root_s_from_its_first_moment",
    ),
    "Only the controller's account gets the rights": (
        "chart: claims_go_only_by_the_rights_of_evacuation_and_release",
    ),
    "The chart grants each right only with the value that needs it": (
        "chart: claims_go_only_by_the_rights_of_evacuation_and_release",
    ),
    "The account may make, change and delete PersistentVolumes": (
        "chart: claims_go_only_by_the_rights_of_evacuation_and_release",
    ),
    "The account may not delete or make pods": (
        "chart: claims_go_only_by_the_rights_of_evacuation_and_release",
        "evacuator: all_volumes_move_with_their_pods",
        "evacuator: a_wrong_annotation_is_refused_and_changes_nothing",
    ),
    "A user who may annotate a claim can have the claim released": (
        "lost_claims: the_claim_s_annotation_decides_before_its_class",
        "lost_claims: a_node_that_carver_has_not_forgotten_keeps_its_claims",
    ),
    "With `evacuation.enabled` nodes serve the calls of a move": (
        "node_moves: the_controller_may_call_what_a_move_needs",
        "node_moves: without_the_setting_nothing_is_served",
    ),
    "All but two of these calls need the controller's certificate": (
        "node_moves: a_node_s_key_without_a_grant_may_call_nothing",
    ),
    "They need the certificate of the other node, and a": (
        "moves_back: differences_are_sent_by_the_grant_of_a_stream",
        "grants: a_grant_says_who_may_read_what",
        "grants: a_grant_is_refused",
        "grants: whatever_byte_is_altered_a_grant_is_refused",
        "grants: no_other_signature_or_certificate_fits",
    ),
    "read a volume that was not granted to the node": (
        "grants: a_grant_is_refused",
        "node_moves: the_target_may_read_the_move_s_snapshots_and_nothing_else",
        "node_moves: a_grant_of_another_time_key_or_form_is_denied",
    ),
    "change what another node has, receives or sends": (
        "node_moves: a_node_s_key_without_a_grant_may_call_nothing",
    ),
    "have a volume erased that another node owns": (
        "node_moves: a_source_that_lies_moves_nothing",
        "node_moves: a_target_that_lies_gets_nothing",
        "node_moves: a_volume_of_another_node_is_not_moved",
        "transfer_rules: a_lie_is_refused_by_the_field_that_gives_it_away",
    ),
    "have what a volume left on another node be overwritten": (
        "moves_back: what_is_left_is_replaced_by_the_way_back_only",
        "moves_back: a_word_that_is_not_meant_is_not_forgotten",
        "transfer_rules: only_what_moved_is_replaceable_and_only_what_is_received_replaces",
    ),
    "A request has 32 KiB at most": (
        "moves_back: differences_are_sent_by_the_grant_of_a_stream",
        "moves_back: digests_are_as_many_as_blocks_and_few_at_a_time",
        "moves_back: a_caller_without_a_first_request_is_ended_and_holds_up_no_other",
    ),
    "hold up the moves of other nodes": (
        "node_moves: few_streams_go_on_at_the_same_time",
        "moves_back: a_caller_without_a_first_request_is_ended_and_holds_up_no_other",
    ),
    "evict a pod, cordon a node": (
        "chart: claims_go_only_by_the_rights_of_evacuation_and_release",
    ),
    "A node is not lost for good by its own word": (
        "membership: what_was_on_a_deleted_node_is_forgotten_after_a_grace",
        "lost_claims: a_node_that_carver_has_not_forgotten_keeps_its_claims",
    ),
    "A node whose key is stolen can keep claims from being released": (
        "membership: nothing_is_forgotten_while_a_member_is_silent",
        "lost_claims: a_node_that_carver_has_not_forgotten_keeps_its_claims",
    ),
}
# Sentences that the tests of another sentence prove, by the beginning of that sentence.
FURTHER = {
    "In a cluster with a controller, each node also serves the controller": (
        "The node serves the CSI services",
        "The node never serves the CSI service Node",
    ),
    "fill the controller's memory by large pods and claims": (
        "keep the controller from reading lists by large pods and claims",
    ),
    "give a claim the volume of another claim": ("give a claim a volume whose size or source",),
    "have a volume of another node deleted": ("confirm that a volume of another node was deleted",),
    "Root on a node has the key and the token": (
        "Root reads and destroys",
        "Root cannot read or destroy",
    ),
    "A node proves its name by the token": (
        "A token counts only if",
        "The token belongs to the ServiceAccount",
        "The token is bound to a pod",
    ),
    "If a PersistentVolume names a node for a volume": (
        "The order in which nodes and controllers started",
        "The rule also holds after",
    ),
    "Such a claim counts only for new volumes": (
        "No PersistentVolume named the group",
        "If both hold, new volumes",
        "The PersistentVolumes of these volumes",
        "Delete these PersistentVolumes",
    ),
    "With certificates from files the controller knows": (
        "In such a cluster each claim to a group counts",
    ),
    "An attacker who has the key of a stolen node": ("Until this claim ends",),
    "Root on a node can write the labels": (
        "Such a label can keep",
        "A label has no other effect",
        "If the label names a deleted node",
    ),
    "Neither the controller nor a node logs secrets": ("The controller writes no core dump",),
    "Only the controller's account gets the rights": ("Both features are off by default",),
    "A user who may annotate a claim can have the claim released": (
        "A user who may write the annotation",
        "Root on a node can write that node's own Node",
        "Such a user can delete the claim",
    ),
    "They need the certificate of the other node, and a": (
        "By the remaining ones, `Send`",
        "For `SendDiffering` the other node also sends",
    ),
    "A node whose key is stolen can keep claims from being released": (
        "Such a node cannot have a claim released",
    ),
}
BEGINNINGS = [*TESTS, *chain.from_iterable(FURTHER.values())]


def sentences() -> Iterator[str]:
    """Each action that the page's table says is not possible, and each sentence of the section."""
    [section] = re.findall(r"^## The controller\n(.*?)^## ", SECURITY.read_text(), re.M | re.S)
    for table in re.findall(r"(?:^\|.*\n)+", section, re.M):
        head, _, *rows = [one.strip("|").split("|") for one in table.splitlines()]
        if head[0].strip() != "attacker":
            # The rights of the account are compared with the chart's (tests/chart).
            continue
        for _, action, possible in rows:
            assert possible.strip().partition(",")[0] in {"yes", "no"}
            if possible.strip() == "no":
                yield action.strip()
    lines = (one.strip() for one in section.splitlines() if not one.startswith(("|", "#")))
    # The items of a list belong to the sentence before it, or are sentences.
    lines = (re.sub(r"^(?:-|\d+\.) ", "", one) for one in lines)
    text = " ".join(one for one in lines if one)
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
    for one in re.split(r"(?<=\.)\s+(?=[A-Z`])", plain.strip()):
        # The purpose of a part of the page is no promise.
        if not one.startswith("This section says "):
            yield one.strip()


def test_each_sentence_has_its_tests() -> None:
    without = [one for one in sentences() if not any(one.startswith(begin) for begin in BEGINNINGS)]
    assert without == []
    every = list(sentences())
    assert [one for one in BEGINNINGS if not any(each.startswith(one) for each in every)] == []
    assert FURTHER.keys() <= TESTS.keys()


@pytest.mark.parametrize("name", sorted({one for every in TESTS.values() for one in every}))
def test_each_test_that_is_named_is_there(name: str) -> None:
    module, _, test = name.partition(": ")
    text = (SECURITY.parents[1] / FILES[module]).read_text()
    assert re.search(rf"^def test_{test}\(", text, re.M)
