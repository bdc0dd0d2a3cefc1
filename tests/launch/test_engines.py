"""What the engines share that start runners by one command."""

from __future__ import annotations

from telegrad.launch.engines import without_place


def test_a_process_of_open_mpi_can_start_another_mpirun() -> None:
    of_the_user = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_MCA_btl": "tcp,self", "HOME": "/root"}
    of_the_job = {
        "OMPI_COMM_WORLD_RANK": "0",
        "OMPI_UNIVERSE_SIZE": "2",
        "OMPI_MCA_ess_base_jobid": "825950209",
        "OMPI_MCA_orte_hnp_uri": "825950208.0;tcp://10.0.0.1:53641",
        "OMPI_MCA_pmix": "^s1,s2",
        "PMIX_NAMESPACE": "825950209",
    }
    assert without_place({**of_the_user, **of_the_job}) == of_the_user


def test_settings_of_open_mpi_are_kept_outside_of_its_jobs() -> None:
    settings = {"OMPI_MCA_orte_base_help_aggregate": "0", "PMIX_MCA_gds": "hash"}
    assert without_place(settings) == settings
