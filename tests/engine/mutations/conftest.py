"""What the mutations share: checkpoints, and the outcome of the engine as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.mutations.subject import Outcome, Workload, save_models, serve


class Subject:
    """Serves workloads; those of the engine as it is once only."""

    def __init__(self, folder: Path) -> None:
        save_models(folder)
        self._folder = folder
        self._clean: dict[Workload, Outcome] = {}

    def serve(self, work: Workload) -> Outcome:
        """By the engine as it is now, mutated or not."""
        return serve(self._folder, work)

    def clean(self, work: Workload) -> Outcome:
        """By the engine as it is in the source; ask before mutating it."""
        if work not in self._clean:
            self._clean[work] = self.serve(work)
        return self._clean[work]


@pytest.fixture(scope="session")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return Subject(tmp_path_factory.mktemp("mutations"))
