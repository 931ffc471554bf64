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
