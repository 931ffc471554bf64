"""Counts as Prometheus reads them."""

from flowjax.monitor.prometheus import exposition


def test_every_number_is_a_gauge_and_policies_are_labels():
    status = {
        "leased": 3,
        "engine_up": True,
        "worker": "a-1",
        "leases": ["x"],
        "algorithms": {"greso": {"p_easy": 0.25}},
        "policies": {"solver": {"version": 4}, 'odd "name"\\': {"version": 5}},
    }
    assert exposition(status, role="dataflow").splitlines() == [
        "# TYPE flowjax_dataflow_leased gauge",
        "flowjax_dataflow_leased 3",
        "# TYPE flowjax_dataflow_engine_up gauge",
        "flowjax_dataflow_engine_up 1",
        "# TYPE flowjax_dataflow_algorithms_greso_p_easy gauge",
        "flowjax_dataflow_algorithms_greso_p_easy 0.25",
        "# TYPE flowjax_dataflow_policy_version gauge",
        'flowjax_dataflow_policy_version{policy="solver"} 4',
        'flowjax_dataflow_policy_version{policy="odd \\"name\\"\\\\"} 5',
    ]


def test_causes_and_ages_are_labels_within_their_policy():
    status = {
        "failed": {"env_error": 2},
        "policies": {"solver": {"dropped": {"too_old": 3}, "ages": {"0": 5, "1": 1}}},
    }
    assert exposition(status, role="dataflow").splitlines() == [
        "# TYPE flowjax_dataflow_failed gauge",
        'flowjax_dataflow_failed{cause="env_error"} 2',
        "# TYPE flowjax_dataflow_policy_dropped gauge",
        'flowjax_dataflow_policy_dropped{policy="solver",cause="too_old"} 3',
        "# TYPE flowjax_dataflow_policy_ages gauge",
        'flowjax_dataflow_policy_ages{policy="solver",age="0"} 5',
        'flowjax_dataflow_policy_ages{policy="solver",age="1"} 1',
    ]


def test_what_policies_tell_is_told_once():
    status = {"version": 4, "waiting": 2, "policies": {"solver": {"version": 4}, "verifier": {"version": 1}}}
    assert [line for line in exposition(status, role="dataflow").splitlines() if not line.startswith("#")] == [
        "flowjax_dataflow_waiting 2",
        'flowjax_dataflow_policy_version{policy="solver"} 4',
        'flowjax_dataflow_policy_version{policy="verifier"} 1',
    ]


def test_engines_are_told_apart():
    engines = [{"url": "http://a:1", "up": True, "models": ["x"]}, {"url": "http://b:1", "up": False, "models": []}]
    assert exposition({"engine_up": True, "engines": engines}, role="rollout").splitlines()[2:] == [
        "# TYPE flowjax_rollout_engines_up gauge",
        'flowjax_rollout_engines_up{engine="http://a:1"} 1',
        'flowjax_rollout_engines_up{engine="http://b:1"} 0',
    ]


def test_names_that_become_one_are_one_series():
    text = exposition({"reward": {"format.ok": 1.0, "format_ok": 2.0}}, role="trainer")
    assert text == "# TYPE flowjax_trainer_reward_format_ok gauge\nflowjax_trainer_reward_format_ok 1.0\n"
