"""Random programs find each mutation of the engine within 500 seeds."""

from __future__ import annotations

import pytest
from tests.support.mutations import MOST_SEEDS, MUTATIONS, applied, found

from telegrad.testing.backward import Different
from telegrad.testing.programs import FEATURES, chosen
from telegrad.testing.soak import run_seed


@pytest.mark.parametrize("name", [name for name, mutation in MUTATIONS.items() if not mutation.hangs])
def test_each_mutation_is_found(name: str) -> None:
    with applied(name), pytest.raises(Different):
        run_all(chosen(MUTATIONS[name].features))


def run_all(features: dict[str, float]) -> None:
    for seed in range(MOST_SEEDS):
        run_seed(seed, features)


@pytest.mark.parametrize("name", [name for name, mutation in MUTATIONS.items() if mutation.hangs])
def test_a_mutation_that_hangs_is_found(name: str) -> None:
    result = found(name)
    assert result is not None
    assert "did not finish" in result.failure


def test_every_feature_has_a_mutation() -> None:
    assert {feature for mutation in MUTATIONS.values() for feature in mutation.features} == set(FEATURES)
